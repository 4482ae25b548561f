"""What a desktop's side sends: answers of guests, gateways and QEMU, and requests to the guest's own servers."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from env_server.driving.browser import list_tabs
from env_server.guest.calls import bind_call
from env_server.guest.root_helper import _Request
from env_server.guest_client import GuestClient
from env_server.providers.gateway.client import (
    ClientOptions,
    Sandbox,
    SandboxBusyError,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxRequest,
)
from env_server.providers.gateway.https_client import HttpsSandboxClient
from env_server.providers.qemu.qmp import QmpClient
from fuzz.parser import Parser, wait_for
from osworld_pipeline.errors import ActionParseError, EvaluatorError, ReplicaError, SetupError

STATUSES = (200, 200, 200, 400, 403, 404, 408, 409, 413, 500, 507, 201, 302)
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
    lambda guest: guest.end_recording(),
    lambda guest: guest.platform(),
    lambda guest: list_tabs(guest),
)
ORIGINS = (b"guest", b"")
SANDBOX = Sandbox(sandbox_id="a/b", session_id="s1")
CALL = SandboxRequest(method="POST", path="/act", content_type="application/json", body=b"{}", request_id="r1")
ANSWER_LIMIT_S = 0.02
"""So short, because a search tries many answers that never come."""


def _pick(options: tuple[Any, ...], data: bytes, place: int) -> Any:
    """An option by one byte of the input."""
    return options[data[place] % len(options)] if len(data) > place else options[0]


def _guest(data: bytes) -> None:
    """The first byte picks the question, the second the status; the rest is the body."""
    ask, status = _pick(ASKED, data, 0), _pick(STATUSES, data, 1)

    async def answer_to() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=data[2:]))
        http = httpx.AsyncClient(base_url="http://guest", transport=transport)
        async with GuestClient(http, name="replica-0") as guest:
            found = await ask(guest)
            json.dumps(found, default=repr)

    wait_for(answer_to())


def _gateway(data: bytes) -> None:
    """The first byte picks the call, the second the status, the third who answers, the fourth the length of a header's
    value; then the value, then the body."""
    status, origin = _pick(STATUSES, data, 1), _pick(ORIGINS, data, 2)
    split = 4 + (data[3] if len(data) > 3 else 0)
    headers = [(b"X-Answered-By", origin), (b"Retry-After", data[4:split].replace(b"\n", b""))]

    async def answer_to() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, headers=headers, content=data[split:]))
        client = HttpsSandboxClient(ClientOptions(url="http://127.0.0.1:9", token=""), transport=transport)
        calls: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: client.start("r", limit_s=5),
            lambda: client.stop(SANDBOX, limit_s=5),
            lambda: client.refresh(SANDBOX, limit_s=5),
            lambda: client.request(SANDBOX, CALL, limit_s=5),
        )
        try:
            await _pick(calls, data, 0)()
        finally:
            await client.close()

    wait_for(answer_to())


def _qemu(data: bytes) -> None:
    """The bytes before the first NUL byte are sent at once, and each further piece after one command."""

    async def answer(theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # QMP's client hangs up
            for piece in data[: 1 << 16].split(b"\0"):
                await loop.sock_sendall(theirs, piece)
                await loop.sock_recv(theirs, 1 << 16)
            theirs.shutdown(socket.SHUT_WR)

    async def ask() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        client = QmpClient(ours, name="replica-0")
        answering = asyncio.create_task(answer(theirs))
        try:
            await client.open(timeout_s=ANSWER_LIMIT_S)
            event = client.expect("STOP", lambda found: bool(found.get("reason")))
            await client.execute("stop", timeout_s=ANSWER_LIMIT_S)
            await event.wait(ANSWER_LIMIT_S)
        finally:
            await client.close()
            await answering
            theirs.close()

    wait_for(ask())


def _sudo(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        request = _Request(ours, 0.0)
        try:
            while request.receive() is None:
                continue
        finally:
            request.close_files()


def _call(data: bytes) -> None:
    try:
        call = json.loads(data)
    except RecursionError as error:
        raise ValueError from error
    bind_call(call)


def _sudo_seed(request: object) -> bytes:
    body = json.dumps(request).encode()
    return struct.pack("!I", len(body)) + body


_CALLS = (
    {"name": "click", "args": [1, 2]},
    {"name": "write", "kwargs": {"message": "hi", "interval": 0.1}},
    {"name": "hotkey", "args": ["ctrl", "c"]},
    {"name": "press", "args": [["a", "b"]], "kwargs": {"presses": 2}},
)
_QEMU = (
    b'{"QMP": {"version": {}, "capabilities": []}}\n\0{"return": {}, "id": 1}\n\0'
    b'{"event": "STOP", "data": {"reason": "x"}}\n{"return": {}, "id": 2}\n'
)

PARSERS = [
    Parser(
        name="guest_answer",
        read=_guest,
        refusals=(ReplicaError, SetupError, EvaluatorError, ActionParseError),
        seeds=(
            b"\0\0[1, 2]",
            b'\1\0{"width": 1, "height": 2}',
            b'\5\0{"directory_tree": {"type": "directory", "name": "a", "children": []}}',
            b'\x09\0{"status": "success", "output": "a", "error": "", "returncode": 0}',
            b'\x0f\0{"output": "[{\\"id\\": \\"1\\", \\"title\\": \\"t\\", \\"url\\": \\"http://a\\"}]"}',
        ),
    ),
    Parser(
        name="gateway_answer",
        read=_gateway,
        refusals=(SandboxBusyError, SandboxFailedError, SandboxGoneError, SandboxRefusedError),
        seeds=(
            b'\0\0\0\0{"sandbox_id": "a", "session_id": "b", "expires_in_s": 5}',
            b"\3\0\0\x015{}",
            b"\1\0\0\0{}",
        ),
    ),
    Parser(
        name="qemu_answer",
        read=_qemu,
        refusals=(ReplicaError,),
        seeds=(_QEMU,),
    ),
    Parser(
        name="sudo_request",
        read=_sudo,
        refusals=(ValueError,),
        seeds=(
            _sudo_seed({"kind": "check", "password": "password"}),
            _sudo_seed({"kind": "run", "argv": ["ls"], "env": {}, "cwd": "/"}),
        ),
    ),
    Parser(
        name="guest_call",
        read=_call,
        refusals=(ValueError, TypeError),
        seeds=tuple(json.dumps(call).encode() for call in _CALLS),
    ),
]
