"""Clients that are slow, send too much, come in large numbers or act for another site do not block other clients."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from raw_http import answer_to, get
from served_viewer import served

from osworld_pipeline.domain.state import StateDir

SLOW_S = 1.0
LINK = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}


@pytest.fixture
async def port(sample_state: StateDir) -> AsyncIterator[int]:
    async with served(sample_state, slow_client_s=SLOW_S, max_connections=20) as port:
        yield port


async def test_idle_connections_are_dropped_and_the_front_page_answers(port: int) -> None:
    crowd = [asyncio.create_task(answer_to(port)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert (await answer_to(port, get("/"))).status == 503, "there is no room as long as they may still ask"
    answers = await asyncio.gather(*crowd)
    assert {answer.status for answer in answers} == {408}
    assert (await answer_to(port, get("/"))).status == 200


async def test_connections_that_stay_open_after_one_request_are_dropped_too(port: int) -> None:
    start = time.monotonic()
    answer = await answer_to(port, get("/newer").replace(b"Connection: close\r\n", b""))
    assert answer.status == 200
    assert time.monotonic() - start >= SLOW_S, "it was kept for another request first"


@pytest.mark.parametrize("half", [b"", b"GET /epis", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "])
async def test_a_request_that_never_ends_is_answered_with_408(port: int, half: bytes) -> None:
    assert (await answer_to(port, half)).status == 408


async def test_a_head_that_arrives_in_small_pieces_does_not_extend_its_time_limit(port: int) -> None:
    start = time.monotonic()
    answer = await answer_to(port, b"GET / HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 200, every_s=0.05)
    assert answer.status == 408
    assert time.monotonic() - start < 10 * SLOW_S


async def test_a_head_without_end_is_answered_with_431(port: int) -> None:
    head = [b"GET / HTTP/1.1\r\n", *[b"X-Header: " + b"y" * 1000 + b"\r\n"] * 200]
    assert (await answer_to(port, *head)).status == 431


@pytest.mark.parametrize("path", ["/login", "/episodes"])
async def test_a_body_that_is_larger_than_a_form_or_too_slow_is_refused(port: int, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    assert (await answer_to(port, head + b"Content-Length: 100000000\r\n\r\n")).status == 413
    chunks = [b"1000\r\n" + b" " * 0x1000 + b"\r\n"] * 10
    assert (await answer_to(port, head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks)).status == 413
    assert (await answer_to(port, head + b"Content-Length: 1000\r\n\r\n", b"token=")).status == 408


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
async def test_garbage_is_answered_with_400_and_the_viewer_continues(port: int, garbage: bytes) -> None:
    assert (await answer_to(port, garbage)).status == 400
    assert (await answer_to(port, get("/newer"))).status == 200


async def test_requests_from_another_site_are_refused_and_its_links_are_answered(port: int) -> None:
    foreign = ({"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}, {"Origin": "http://localhost:3000"},
               {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"})  # fmt: skip
    for headers in foreign:
        assert (await answer_to(port, get("/episodes?where=true", **headers))).status == 403, headers
    for headers in ({}, LINK | {"Sec_Fetch_Site": "same-site"}, {"Sec_Fetch_Site": "same-origin"}):
        assert (await answer_to(port, get("/episodes", **headers))).status == 200, headers


async def test_another_site_cannot_use_the_cookie_of_a_browser(sample_state: StateDir) -> None:
    async with served(sample_state, token=SecretStr("secret")) as port:
        answer = await answer_to(port, get("/?token=secret"))
        cookie = answer.head.partition(b"set-cookie: ")[2].partition(b";")[0].decode()
        assert (await answer_to(port, get("/newer", Cookie=cookie))).status == 200
        assert (await answer_to(port, get("/newer", Cookie=cookie, Sec_Fetch_Site="same-site"))).status == 401
        assert (await answer_to(port, get("/", Cookie=cookie, Sec_Fetch_Site="cross-site", **LINK))).status == 200
