"""Real connections to a real server: clients that are slow, send too much or come in crowds are disconnected, and
other clients are not affected."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from listening_server import listening
from raw_http import answer_to
from surface_server import TASK

SLOW_S = 0.4


@pytest_asyncio.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    async with listening(tmp_path, slow_client_s=SLOW_S, max_connections=20) as server:
        yield server.port


async def test_client_that_sends_nothing_is_disconnected(port: int) -> None:
    start = time.monotonic()
    answer = await answer_to(port)
    assert (answer.status, answer.json()["fault"]) == (408, "client_error")
    assert SLOW_S <= time.monotonic() - start < SLOW_S + 1


async def test_head_that_arrives_slowly_does_not_extend_its_time_limit(port: int) -> None:
    start = time.monotonic()
    answer = await answer_to(port, b"GET /healthz HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 100, every_s=0.05)
    assert answer.status == 408
    assert time.monotonic() - start < SLOW_S + 1


async def test_second_request_on_a_connection_has_its_time_too(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    await asyncio.sleep(2 * SLOW_S)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.write(b"GET /health")
    async with asyncio.timeout(5):
        rest = await reader.read()
    assert rest.count(b"200 OK") == 1, "an idle connection is kept, and answered"
    assert b"408 Request Timeout" in rest, "half a request is not"
    writer.close()


async def test_body_that_never_comes_is_408(port: int) -> None:
    head = b"POST /reset HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    answer = await answer_to(port, head, *[b" "] * 100, every_s=0.05)
    assert (answer.status, answer.json()["fault"]) == (408, "client_error")


async def test_head_without_end_is_431(port: int) -> None:
    answer = await answer_to(port, b"GET /healthz HTTP/1.1\r\n", *[b"X-Header: " + b"y" * 1000 + b"\r\n"] * 200)
    assert answer.status == 431


@pytest.mark.parametrize("size", [100 * 1024 * 1024])
async def test_body_of_a_hundred_megabytes_is_413_at_once(port: int, size: int) -> None:
    head = f"POST /reset HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
    start = time.monotonic()
    answer = await answer_to(port, head)
    assert (answer.status, answer.json()["fault"]) == (413, "client_error")
    assert time.monotonic() - start < SLOW_S, "the body was not waited for"


async def test_chunks_without_end_are_413(tmp_path: Path) -> None:
    head = b"POST /reset HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    # A longer limit: sixteen megabytes can take a busy machine longer than the usual limit of a slow client.
    async with listening(tmp_path, slow_client_s=20.0, max_connections=20) as server:
        answer = await answer_to(server.port, head, *[chunk] * 20, limit_s=15.0)
    assert answer.status == 413


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /reset HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_is_400_and_the_server_continues(port: int, garbage: bytes) -> None:
    assert (await answer_to(port, garbage)).status == 400
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_one_connection_too_many_is_503_until_slow_connections_time_out(port: int) -> None:
    crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    answer = await answer_to(port)
    assert (answer.status, answer.json()["fault"]) == (503, "no_capacity")
    await asyncio.sleep(SLOW_S + 0.2)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
    for _, writer in crowd:
        writer.close()


async def test_call_that_takes_longer_than_the_limit_of_a_slow_client_is_not_cut_off(port: int) -> None:
    slow = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 2 * SLOW_S}}]}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.post("/reset", json={"task_config": slow})).status_code == 200
