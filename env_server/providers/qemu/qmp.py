"""A small client of QEMU's machine protocol (QMP): JSON lines over a connected socket, one command at a time, with file
descriptors; every wait has a limit."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osworld_pipeline.errors import ReplicaError

COMMAND_LIMIT_S = 10.0
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 24


class QmpClient:
    """`name` is the replica's, for messages. Not usable before `open`."""

    def __init__(self, connection: socket.socket, *, name: str) -> None:
        connection.setblocking(False)
        self._socket, self._name = connection, name
        self._turn = asyncio.Lock()
        self._greeted: asyncio.Future[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._watchers: list[tuple[Callable[[Mapping[str, Any]], bool], asyncio.Future[Mapping[str, Any]]]] = []
        self._last_id = 0
        self._reader: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def open(self, *, timeout_s: float = COMMAND_LIMIT_S) -> None:
        """Waits for QEMU's greeting; it comes once every disk and memory file is open."""
        self._greeted = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        await self._wait(self._greeted, "with its greeting", timeout_s)
        await self.execute("qmp_capabilities", timeout_s=timeout_s)

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        fds: Sequence[int] = (),
        timeout_s: float = COMMAND_LIMIT_S,
    ) -> Any:
        """What QEMU returns. ReplicaError if it refuses, is gone or does not answer."""
        async with self._turn:
            if self._failure is not None:
                raise self._lost()
            self._last_id += 1
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._answers[self._last_id] = answer
            try:
                await self._send({"execute": command, "arguments": dict(arguments or {}), "id": self._last_id}, fds)
                return await self._wait(answer, command, timeout_s)
            finally:
                self._answers.pop(self._last_id, None)

    def expect(self, event: str, matches: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> "ExpectedEvent":
        """Call it before the command that causes the event."""
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        watcher = (lambda message: message["event"] == event and matches(message.get("data", {})), future)
        self._watchers.append(watcher)
        if self._failure is not None:
            future.set_exception(self._lost())
        return ExpectedEvent(self, event, future)

    async def close(self) -> None:
        """Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._fail("was closed")
        self._socket.close()

    async def wait_for(self, event: str, future: asyncio.Future[Mapping[str, Any]], timeout_s: float) -> Any:
        try:
            return await self._wait(future, f"with the event {event}", timeout_s)
        finally:
            self._watchers = [watcher for watcher in self._watchers if watcher[1] is not future]

    async def _wait(self, future: asyncio.Future[Any], what: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise ReplicaError(
                f"QEMU of {self._name} did not answer {what} within {timeout_s:g} s; replace the replica"
            ) from error

    async def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            if fds:
                # A command is shorter than any socket's buffer, so a send is never partial.
                sent = socket.send_fds(self._socket, [data], list(fds))
                data = data[sent:]
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            self._fail(f"is gone ({error.strerror or error})")
            raise self._lost() from error

    async def _read(self) -> None:
        loop, pending = asyncio.get_running_loop(), b""
        while True:
            try:
                data = await loop.sock_recv(self._socket, _READ_BYTES)
            except OSError as error:
                return self._fail(f"is gone ({error.strerror or error})")
            if not data:
                return self._fail("has ended")
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                return self._fail("sent a line without end")
            for line in lines:
                try:
                    message = json.loads(line) if line.strip() else {}
                except ValueError:
                    return self._fail("sent a line that is not JSON")
                self._handle(message)

    def _handle(self, message: Any) -> None:
        if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
            return self._fail("sent a line that is not a QMP message")
        if "QMP" in message and self._greeted is not None and not self._greeted.done():
            self._greeted.set_result(None)
        elif "event" in message:
            for matches, future in self._watchers:
                if not future.done() and matches(message):
                    future.set_result(message.get("data", {}))
        elif "return" in message or "error" in message:
            number = message.get("id", self._last_id)
            answer = self._answers.get(number) if isinstance(number, int) else None
            if answer is not None and not answer.done():
                if "error" in message:
                    error = message["error"]
                    reason = str(error.get("desc", error) if isinstance(error, dict) else error)
                    answer.set_exception(ReplicaError(f"QEMU of {self._name} refused: {reason}"))
                else:
                    answer.set_result(message["return"])
        return None

    def _fail(self, reason: str) -> None:
        """Fails all pending requests, and all later ones."""
        if self._failure is None:
            self._failure = reason
        waiting = [*self._answers.values(), *(future for _, future in self._watchers)]
        for future in (*waiting, self._greeted):
            if future is not None and not future.done():
                future.set_exception(self._lost())
                future.exception()  # retrieved, so that asyncio does not log it

    def _lost(self) -> ReplicaError:
        return ReplicaError(f"QEMU of {self._name} {self._failure}; replace the replica")


class ExpectedEvent:
    """An event that is expected."""

    def __init__(self, client: QmpClient, name: str, future: asyncio.Future[Mapping[str, Any]]) -> None:
        self._client, self._name, self._future = client, name, future

    async def wait(self, timeout_s: float) -> Mapping[str, Any]:
        """Its data. ReplicaError if it does not come, or QEMU ends."""
        return await self._client.wait_for(self._name, self._future, timeout_s)
