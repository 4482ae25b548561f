"""A guest's answers are not trusted: one that is too long or invalid is a fault of that desktop alone."""

import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.guest_client import MAX_ANSWER_BYTES, MAX_BYTES_OF, GuestClient
from osworld_pipeline.errors import ActionParseError, EvaluatorError, ReplicaError, SetupError
from osworld_pipeline.task_schema.context import CommandResult

MIB = 1 << 20


def guest_that(answer: Callable[[httpx.Request], httpx.Response]) -> GuestClient:
    http = httpx.AsyncClient(base_url="http://guest", transport=httpx.MockTransport(answer))
    return GuestClient(http, name="replica-0")


class Endless(httpx.AsyncByteStream):
    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.num_bytes += MIB
            yield b"a" * MIB

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/platform", lambda guest: guest.platform()),
        ("/terminal", lambda guest: guest.terminal()),
        ("/screenshot", lambda guest: guest.screenshot()),
        ("/accessibility", lambda guest: guest.accessibility()),
        ("/list_directory", lambda guest: guest.list_directory("/")),
        ("/execute", lambda guest: guest.execute("true")),
    ],
)
async def test_an_answer_without_end_is_read_only_up_to_the_limit_of_its_route(
    path: str, ask: Callable[[GuestClient], Awaitable[object]]
) -> None:
    body = Endless()
    async with guest_that(lambda request: httpx.Response(200, stream=body)) as guest:
        with pytest.raises(ReplicaError, match=rf"answered {path} with more than \d+ bytes; replace the replica"):
            await ask(guest)
    assert body.num_bytes <= MAX_BYTES_OF.get(path, MAX_ANSWER_BYTES) + MIB
    assert body.is_closed


async def test_compressed_answers_are_not_requested_and_not_decompressed() -> None:
    asked: list[str] = []
    bomb = gzip.compress(bytes(64 * MIB))

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("accept-encoding", ""))
        stream = httpx.Response(200, content=bomb).stream
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=stream)

    async with GuestClient.over_tcp("http://127.0.0.1:9", name="replica-0") as real:
        assert real._http.headers["accept-encoding"] == "identity"  # pyright: ignore[reportPrivateUsage]
    async with guest_that(answer) as guest:
        with pytest.raises(ReplicaError, match="compressed its answer to /platform"):
            await guest.platform()


ASKED: tuple[Callable[[GuestClient], Awaitable[Any]], ...] = (
    lambda guest: guest.cursor_position(),
    lambda guest: guest.screen_size(),
    lambda guest: guest.window_size("x"),
    lambda guest: guest.terminal(),
    lambda guest: guest.accessibility(),
    lambda guest: guest.list_directory("/"),
    lambda guest: guest.desktop_path(),
    lambda guest: guest.wallpaper(),
    lambda guest: guest.file("/etc/passwd"),
    lambda guest: guest.execute("true"),
    lambda guest: guest.act([], settle_s=0.1),
    lambda guest: guest.launch("true"),
    lambda guest: guest.start_recording(),
)
KEYS = ("output", "AT", "width", "height", "directory_tree", "desktop_path", "returncode", "status", "error", "message")


@settings(max_examples=400, deadline=None)
@given(
    ask=st.sampled_from(ASKED),
    status=st.sampled_from([200, 200, 200, 400, 403, 404, 408, 413, 500]),
    body=st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
    | st.just(b"[" * 100_000),
)
async def test_any_answer_is_either_parsed_or_reported_as_a_fault(
    ask: Callable[[GuestClient], Awaitable[Any]], status: int, body: bytes
) -> None:
    async with guest_that(lambda request: httpx.Response(status, content=body)) as guest:
        found: Any = None
        with contextlib.suppress(ReplicaError, SetupError, EvaluatorError, ActionParseError):
            found = await ask(guest)
        assert found is None or isinstance(found, tuple | str | bytes | bool | dict | CommandResult)
