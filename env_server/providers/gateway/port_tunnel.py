"""Forwards ports of a desktop's own loopback (a browser's, VLC's) to ports of this machine, for graders that open them.
The data travels in small files, written and fetched with the guest's protocol, so no other connection is needed."""

import asyncio
import base64
import json
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from env_server.guest_client import GuestClient
from env_server.tcp_forward import tcp_forward
from osworld_pipeline.errors import EvaluatorError, ReplicaError, SetupError

EVALUATOR_PORTS: Mapping[str, Sequence[int]] = {"chromium": (9222, 1337), "vlc": (8080,)}
"""The ports that OSWorld's getters use; for a browser the port that tasks forward, then the one it is started with."""
READ_BYTES = 256 * 1024
MAX_WAITING = 16
"""Most records that wait to be sent; beyond that a connection is not read."""
SHORT_POLL_S, LONG_POLL_S = 0.01, 0.25
"""Interval between two polls of the guest: at first, and after some time without data."""
KEEP_S = 20.0
"""Longest interval between two files for the guest's program, which ends after three times this long without one."""
ACKNOWLEDGE_AFTER = 8
"""Number of fetched files that are acknowledged together; the guest holds up to 8 MiB until then."""
CALL_LIMIT_S = 30.0
NUM_ATTEMPTS = 3
RETRY_S = 0.3

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
T = TypeVar("T")
Record = tuple[int, list[int], str | None]


@asynccontextmanager
async def forwarded_ports(
    guest: GuestClient,
    ports: Mapping[str, Sequence[int]] = EVALUATOR_PORTS,
    *,
    listeners: Mapping[str, socket.socket] | None = None,
) -> AsyncIterator[dict[str, int]]:
    """Opens a port on 127.0.0.1 for each name, for processes of this user, until the block ends. A connection to it
    goes to the first of the guest's ports that answers, and is closed if none does, or if the guest is gone.
    `listeners` are used instead of new ports: sockets of a sandbox's own loopback."""
    tunnel = _Tunnel(guest)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ports-"))
        stack.push_async_callback(tunnel.close)
        forwarded: dict[str, int] = {}
        for name, numbers in ports.items():
            if listeners is not None:
                server = await asyncio.start_server(tunnel.accept(numbers), sock=listeners[name])
                stack.callback(server.close)
                forwarded[name] = listeners[name].getsockname()[1]
                continue
            path = Path(folder) / name
            server = await asyncio.start_unix_server(tunnel.accept(numbers), path)
            stack.callback(server.close)
            door = await stack.enter_async_context(GuestClient.over_unix_socket(str(path), name=name))
            forwarded[name] = (await stack.enter_async_context(tcp_forward(door)))[1]
        yield forwarded


class _Tunnel:
    """The guest's program starts with the first connection."""

    def __init__(self, guest: GuestClient) -> None:
        self._guest = guest
        self._folder = f"/tmp/.ports-{secrets.token_hex(8)}"  # noqa: S108 - in the guest, and not guessable
        self._program = Path(__file__).with_name("port_relay.py").read_text(encoding="utf-8")
        self._num_opened = self._num_sent = self._num_fetched = self._num_acknowledged = 0
        self._outbox: list[Record] = []
        self._open: dict[int, tuple[asyncio.StreamWriter, asyncio.Event]] = {}
        self._changed = asyncio.Condition()
        self._pumps: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._is_over = False

    def accept(self, ports: Sequence[int]) -> Accept:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None, "start_unix_server makes one"
            self._serving.add(task)
            try:
                await self._serve(list(ports), reader, writer)
            except (OSError, asyncio.CancelledError):
                pass  # its client is gone, or the tunnel is closed
            finally:
                writer.close()
                self._serving.discard(task)

        return serve

    async def close(self) -> None:
        await self._end()
        tasks = [*self._pumps, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, ports: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_over:
            return
        number, is_over = self._num_opened, asyncio.Event()
        self._num_opened += 1
        self._open[number] = writer, is_over
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._run(self._send)), asyncio.create_task(self._run(self._fetch))]
        try:
            await self._put(number, ports, b"")
            while data := await reader.read(READ_BYTES):
                await self._put(number, ports, data)
            await self._put(number, ports, None)
            await is_over.wait()
        finally:
            self._open.pop(number, None)

    async def _put(self, number: int, ports: list[int], data: bytes | None) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._outbox) < MAX_WAITING or self._is_over)
            self._outbox.append((number, ports, None if data is None else base64.b64encode(data).decode()))
            self._changed.notify_all()

    async def _run(self, pump: Callable[[], Awaitable[None]]) -> None:
        try:
            await pump()
        except (ReplicaError, SetupError, EvaluatorError):
            pass  # open connections are closed, as if the port were gone
        finally:
            await self._end()

    async def _send(self) -> None:
        await self._guest.launch(["python", "-c", self._program, self._folder])
        while not self._is_over:
            async with self._changed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_S):
                        await self._changed.wait_for(self._has_news)
                batch, self._outbox = self._outbox, []
                self._num_acknowledged = self._num_fetched
                self._changed.notify_all()
            order = json.dumps({"records": batch, "num_fetched": self._num_acknowledged}).encode()
            path = f"{self._folder}/in-{self._num_sent}"
            await _surely(lambda path=path, order=order: self._guest.upload(path, order, timeout_s=CALL_LIMIT_S))
            self._num_sent += 1

    def _has_news(self) -> bool:
        return self._is_over or bool(self._outbox) or self._num_fetched - self._num_acknowledged >= ACKNOWLEDGE_AFTER

    async def _fetch(self) -> None:
        poll_s = SHORT_POLL_S
        while not self._is_over:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_over or bool(self._open))
            path = f"{self._folder}/out-{self._num_fetched}"
            text = await _surely(lambda path=path: self._guest.file(path, timeout_s=CALL_LIMIT_S))
            if text is None:
                await asyncio.sleep(poll_s)
                poll_s = min(LONG_POLL_S, 1.3 * poll_s)
                continue
            poll_s = SHORT_POLL_S
            connection, data = _record(text)
            async with self._changed:
                self._num_fetched += 1
                self._changed.notify_all()
            await self._pass_on(connection, data)

    async def _pass_on(self, connection: int, data: bytes | None) -> None:
        writer, is_over = self._open.get(connection, (None, None))
        if writer is None or is_over is None:
            return  # its client has disconnected
        try:
            if data is None:
                is_over.set()
                writer.close()
            else:
                writer.write(data)
                await writer.drain()
        except OSError:
            is_over.set()

    async def _end(self) -> None:
        self._is_over = True
        async with self._changed:
            self._changed.notify_all()
        for writer, is_over in self._open.values():
            is_over.set()
            writer.close()


def _record(text: bytes) -> tuple[int, bytes | None]:
    """ReplicaError if it is invalid: any program in the guest may have written it."""
    try:
        connection, data = json.loads(text)
        return int(connection), None if data is None else base64.b64decode(data, validate=True)
    except (ValueError, TypeError) as error:
        raise ReplicaError("the relay in the guest wrote invalid data") from error


async def _surely(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a failed call: writing or reading a file twice has the same result."""
    for _ in range(NUM_ATTEMPTS - 1):
        with suppress(ReplicaError, SetupError):
            return await call()
        await asyncio.sleep(RETRY_S)
    return await call()
