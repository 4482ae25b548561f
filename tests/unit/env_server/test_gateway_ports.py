"""Ports forwarded through files: the guest's real program runs with a guest whose files are this machine's."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from env_server.guest_client import GuestClient
from env_server.providers.gateway.port_tunnel import forwarded_ports
from osworld_pipeline.errors import ReplicaError


class FileGuest:
    """Launches, writes and reads on this machine; `on_file` may edit what is read. `num_failures` answers are lost."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder = ""
        self.num_failures = 0
        self.on_file: Callable[[bytes], bytes] = lambda data: data
        self.is_gone = False

    async def launch(self, command: list[str]) -> None:
        self.folder = command[-1]
        self.processes.append(_run(command[1:]))

    async def upload(self, path: str, data: bytes, *, timeout_s: float) -> None:
        self._meet()
        _write(path, data)
        if self.num_failures:
            self.num_failures -= 1
            raise ReplicaError("the answer was lost")

    async def file(self, path: str, *, timeout_s: float) -> bytes | None:
        self._meet()
        if self.num_failures:
            self.num_failures -= 1
            raise ReplicaError("the answer was lost")
        data = _read(path)
        return None if data is None else self.on_file(data)

    def _meet(self) -> None:
        if self.is_gone:
            raise ReplicaError("the guest is gone")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _run(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *words])


def _write(path: str, data: bytes) -> None:
    """Writes half of the data first, as a guest may: its program may read the file in between."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(data[: len(data) // 2])
    Path(path).write_bytes(data)


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def _folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("ports-*"))


@pytest.fixture
async def guest() -> AsyncIterator[FileGuest]:
    made = FileGuest()
    yield made
    made.stop()


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """A port that sends back what it receives, and closes the connection at the end of the input."""

    serving: list[asyncio.Task[None]] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(
        lambda reader, writer: serving.append(asyncio.create_task(echo(reader, writer))), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def lend(guest: FileGuest, *ports: int) -> Any:
    return forwarded_ports(cast("GuestClient", guest), {"echo": ports})


async def said_back(port: int, data: bytes) -> bytes:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        back = await reader.read()
        writer.close()
        return back


async def test_bytes_come_back_unchanged_on_several_connections_at_once(guest: FileGuest) -> None:
    data = [os.urandom(size) for size in (1, 70_000, 900_000)]
    async with echoing() as port, lend(guest, port) as forwarded:
        assert await asyncio.gather(*(said_back(forwarded["echo"], each) for each in data)) == data
    assert len(guest.processes) == 1


async def test_lost_answers_neither_lose_nor_duplicate_a_byte(guest: FileGuest) -> None:
    async with echoing() as port, lend(guest, port) as forwarded:
        assert await said_back(forwarded["echo"], b"first") == b"first"
        guest.num_failures = 2
        assert await said_back(forwarded["echo"], b"second") == b"second"


async def test_the_first_port_that_answers_is_used(guest: FileGuest) -> None:
    async with echoing() as port, lend(guest, 1, port) as forwarded:
        assert await said_back(forwarded["echo"], b"hello") == b"hello"


async def test_a_connection_to_a_port_without_a_listener_is_closed(guest: FileGuest) -> None:
    async with lend(guest, 1) as forwarded:
        assert await said_back(forwarded["echo"], b"hello") == b""


@pytest.mark.parametrize("nonsense", [b"", b"{}", b"[1]", b'["x", "y"]', b'[0, "***"]', b"\xff"])
async def test_invalid_data_from_the_guest_closes_connections_and_nothing_else(
    guest: FileGuest, nonsense: bytes
) -> None:
    guest.on_file = lambda data: nonsense
    async with echoing() as port, lend(guest, port) as forwarded:
        assert await said_back(forwarded["echo"], b"hello") == b""


async def test_connections_of_a_guest_that_is_gone_are_closed(guest: FileGuest) -> None:
    async with echoing() as port, lend(guest, port) as forwarded:
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarded["echo"])
        writer.write(b"hello")
        async with asyncio.timeout(20):
            assert await reader.readexactly(5) == b"hello"
            guest.is_gone = True
            assert await reader.read() == b""
        writer.close()


async def test_without_a_connection_nothing_runs_in_the_guest_and_the_ports_end_with_the_block(
    guest: FileGuest,
) -> None:
    before = _folders()
    async with lend(guest, 1) as forwarded:
        pass
    assert guest.processes == []
    assert _folders() <= before
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", forwarded["echo"])
