"""The client of QEMU's monitor against a server that speaks its protocol correctly or incorrectly."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from env_server.providers.qemu.qmp import QmpClient
from osworld_pipeline.errors import ReplicaError

GREETING = {"QMP": {"version": {}, "capabilities": []}}
Script = Callable[["FakeQemu"], Awaitable[None]]


class FakeQemu:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._pending = connection, b""

    async def say(self, *messages: Any) -> None:
        data = b"".join(json.dumps(message).encode() + b"\r\n" for message in messages)
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self) -> dict[str, Any]:
        while b"\n" not in self._pending:
            self._pending += await asyncio.get_running_loop().sock_recv(self._socket, 4096)
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    async def answer(self, value: Any = None) -> dict[str, Any]:
        received = await self.receive()
        await self.say({"return": {} if value is None else value, "id": received["id"]})
        return received

    def receive_files(self) -> tuple[bytes, list[int]]:
        self._socket.setblocking(True)
        data, files, _, _ = socket.recv_fds(self._socket, 4096, 4)
        return data, files


@asynccontextmanager
async def connected(script: Script) -> AsyncIterator[QmpClient]:
    ours, theirs = socket.socketpair()
    with theirs:
        server = asyncio.create_task(script(FakeQemu(theirs)))
        client = QmpClient(ours, name="replica-7")
        try:
            yield client
        finally:
            await client.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


async def greet(qemu: FakeQemu) -> None:
    await qemu.say(GREETING)
    assert (await qemu.answer())["execute"] == "qmp_capabilities"


async def test_a_command_is_answered_with_what_it_returns() -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        received = await qemu.answer({"status": "running"})
        assert received["arguments"] == {"a": 1}

    async with connected(script) as client:
        await client.open()
        assert await client.execute("query-status", {"a": 1}) == {"status": "running"}


async def test_a_refusal_is_a_replica_error_with_qemus_reason() -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        received = await qemu.receive()
        await qemu.say({"error": {"class": "GenericError", "desc": "no such disk"}, "id": received["id"]})

    async with connected(script) as client:
        await client.open()
        with pytest.raises(ReplicaError, match="replica-7 refused: no such disk"):
            await client.execute("blockdev-add")


async def test_events_between_answers_reach_the_caller_that_expects_them() -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        received = await qemu.receive()
        await qemu.say(
            {"event": "MIGRATION", "data": {"status": "active"}, "timestamp": {}},
            {"return": {}, "id": received["id"]},
            {"event": "MIGRATION", "data": {"status": "completed"}, "timestamp": {}},
        )

    async with connected(script) as client:
        await client.open()
        over = client.expect("MIGRATION", lambda data: data["status"] == "completed")
        await client.execute("migrate")
        assert await over.wait(5.0) == {"status": "completed"}


async def test_a_late_answer_is_not_used_as_the_answer_to_the_next_command() -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        first = await qemu.receive()
        second = await qemu.receive()
        await qemu.say({"return": "late", "id": first["id"]}, {"return": "right", "id": second["id"]})

    async with connected(script) as client:
        await client.open()
        with pytest.raises(ReplicaError, match=r"did not answer screendump within 0\.05 s"):
            await client.execute("screendump", timeout_s=0.05)
        assert await client.execute("query-status") == "right"


async def test_open_files_are_sent_with_a_command() -> None:
    read_end, write_end = os.pipe()

    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        data, files = await asyncio.to_thread(qemu.receive_files)
        os.write(files[0], b"through")
        os.close(files[0])
        await qemu.say({"return": {}, "id": json.loads(data)["id"]})

    async with connected(script) as client:
        await client.open()
        await client.execute("getfd", {"fdname": "state"}, fds=[write_end])
    os.close(write_end)
    assert os.read(read_end, 100) == b"through"
    os.close(read_end)


async def test_all_waiting_callers_get_an_error_when_qemu_ends() -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        await qemu.receive()
        qemu._socket.close()

    async with connected(script) as client:
        await client.open()
        event = client.expect("RESUME")
        with pytest.raises(ReplicaError, match="QEMU of replica-7 has ended"):
            await client.execute("cont")
        with pytest.raises(ReplicaError, match="has ended"):
            await event.wait(5.0)
        with pytest.raises(ReplicaError, match="has ended"):
            await client.execute("query-status")


@pytest.mark.parametrize("line", [b"{nonsense\n", b"[1, 2]\n"])
async def test_a_line_that_is_not_a_message_ends_the_connection(line: bytes) -> None:
    async def script(qemu: FakeQemu) -> None:
        await greet(qemu)
        await qemu.receive()
        await asyncio.get_running_loop().sock_sendall(qemu._socket, line)

    async with connected(script) as client:
        await client.open()
        with pytest.raises(ReplicaError, match="sent a line that is no"):
            await client.execute("query-status")


async def test_no_greeting_in_time_is_an_error() -> None:
    async def script(qemu: FakeQemu) -> None:
        await asyncio.sleep(60)

    async with connected(script) as client:
        with pytest.raises(ReplicaError, match="did not answer with its greeting"):
            await client.open(timeout_s=0.05)
