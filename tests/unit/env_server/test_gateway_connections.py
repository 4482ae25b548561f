"""The gateway's connections are bounded as the env server's are."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from fake_desktops import FakeProvider
from raw_http import answer_to, get

from env_server.gateway_server import main as gateway_main
from env_server.main import bind
from env_server.server_settings import ServerSettings

HEAD_S = 0.5


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(gateway_main, "make_provider", lambda settings: FakeProvider())
    arguments = gateway_main.make_parser().parse_args([])
    settings = ServerSettings.from_environment({}, port=0, slow_client_s=HEAD_S, max_connections=4)
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
    with suppress(ConnectionError):
        return (await answer_to(port, get("/healthz"))).status == 200
    return False


@pytest.mark.parametrize("half", [b"", b"POST /v1/sandb", b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-A: "])
async def test_a_client_whose_request_never_ends_is_disconnected(port: int, half: bytes) -> None:
    started = time.monotonic()
    assert (await answer_to(port, half)).status == 408
    assert time.monotonic() - started < 10 * HEAD_S


async def test_one_connection_too_many_is_refused_until_silent_connections_time_out(port: int) -> None:
    answers = await asyncio.gather(*(answer_to(port) for _ in range(8)))
    assert sorted(answer.status for answer in answers) == [408] * 4 + [503] * 4
    assert await is_served(port)
