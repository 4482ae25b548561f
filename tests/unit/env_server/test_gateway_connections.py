"""The gateway's connections are bounded as the env server's are."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from fake_desktops import FakeProvider

from env_server.gateway_server import main as gateway_main
from env_server.main import bind
from env_server.settings import Settings

HEAD_S = 0.5


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(gateway_main, "make_provider", lambda settings: FakeProvider())
    arguments = gateway_main.make_parser().parse_args([])
    settings = Settings.from_environment({}, port=0, slow_client_s=HEAD_S, max_connections=4)
    with bind(settings) as listener:
        serving = asyncio.create_task(gateway_main.serve_gateway(settings, arguments, listener))
        number = listener.getsockname()[1]
        try:
            while not await is_served(number):
                assert not serving.done(), serving
                await asyncio.sleep(0.02)
            yield number
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


async def is_served(port: int) -> bool:
    return b"200 OK" in await say(port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


async def say(port: int, data: bytes) -> bytes:
    """What is answered until the other end closes."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return b""
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("half", [b"", b"POST /v1/sandb", b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-A: "])
async def test_a_request_that_never_ends_is_shown_out(port: int, half: bytes) -> None:
    started = time.monotonic()
    assert b"408" in (await say(port, half)).splitlines()[0]
    assert time.monotonic() - started < 10 * HEAD_S


async def test_one_connection_too_many_is_refused_and_those_that_say_nothing_make_room(port: int) -> None:
    answers = await asyncio.gather(*(say(port, b"") for _ in range(8)))
    heads = [answer.splitlines()[0] for answer in answers]
    assert sum(b"503" in head for head in heads) == 4
    assert sum(b"408" in head for head in heads) == 4
    assert await is_served(port)
