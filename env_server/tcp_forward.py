"""Forwards a guest's protocol to programs that use only TCP, such as OSWorld's: to a port of this machine's loopback,
only for the duration of a block and for processes of the same user; or to a socket of a sandbox."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from env_server.guest_client import GuestClient
from osworld_pipeline.errors import ReplicaError

CHUNK_BYTES = 256 * 1024
CONNECT_LIMIT_S = 10.0
_LOOPBACK = "127.0.0.1"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def tcp_forward(guest: GuestClient) -> AsyncIterator[tuple[str, int]]:
    """(host, port) at which the guest answers until the block ends; a guest on TCP already has one.

    Raises:
        ReplicaError: it answers neither on a Unix socket nor on plain TCP.
    """
    address = urlsplit(guest.address)
    if address.scheme == "http" and address.hostname is not None:
        yield address.hostname, address.port or 80
        return
    bridge = _Bridge(_connector(guest), is_private=False)
    # asyncio disables Nagle's algorithm only for sockets whose protocol is set; start_server sets it if given a host.
    server = await asyncio.start_server(bridge.serve, _LOOPBACK, 0)
    try:
        yield _LOOPBACK, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await bridge.close()


@asynccontextmanager
async def served(guest: GuestClient, listener: socket.socket) -> AsyncIterator[None]:
    """The guest answers at `listener`, a socket of a sandbox's own loopback, until the block ends.

    Raises:
        ReplicaError: as `tcp_forward`.
    """
    bridge = _Bridge(_connector(guest), is_private=True)
    server = await asyncio.start_server(bridge.serve, sock=listener)
    try:
        yield
    finally:
        server.close()
        await bridge.close()


def _connector(guest: GuestClient) -> Callable[[], Awaitable[Streams]]:
    address = urlsplit(guest.address)
    if address.scheme == "unix":
        path = guest.address.removeprefix("unix:")
        return lambda: asyncio.open_unix_connection(path)
    if address.scheme == "http" and address.hostname is not None:
        host, port = address.hostname, address.port or 80
        return lambda: asyncio.open_connection(host, port)
    raise ReplicaError("this desktop's guest answers neither on a Unix socket nor on TCP and cannot be forwarded")


class _Bridge:
    """`is_private`: only the intended process can connect, so no user is checked."""

    def __init__(self, connect: Callable[[], Awaitable[Streams]], *, is_private: bool) -> None:
        self._connect, self._is_private = connect, is_private
        self._serving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # accepted at the last moment
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None, "created by start_server"
        self._serving.add(task)
        try:
            if self._is_private or await asyncio.to_thread(_is_of_this_user, writer.get_extra_info("peername"), writer):
                await self._join(reader, writer)
        except (OSError, TimeoutError):
            pass  # the caller sees its connection closed, as if the guest were gone
        except asyncio.CancelledError:
            pass  # only by `close`; asyncio would log a connection whose task was cancelled
        finally:
            writer.close()
            self._serving.discard(task)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(set(self._serving))

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            guest_reader, guest_writer = await self._connect()
        directions = [
            asyncio.create_task(_copy(reader, guest_writer)),
            asyncio.create_task(_copy(guest_reader, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            if directions[1].done():
                return
            await directions[1]  # the caller has sent everything; the answer may still come
        finally:
            guest_writer.close()  # first, because the rest may be cancelled
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _is_of_this_user(peer: tuple[str, int], writer: asyncio.StreamWriter) -> bool:
    """Whether this user owns the peer's socket, according to the kernel's table of connections. A guest runs every
    command that it receives, so other users must not reach it."""
    local = writer.get_extra_info("sockname")
    wanted = (f":{peer[1]:04X}", f":{local[1]:04X}")
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(wanted[0]) and fields[2].endswith(wanted[1]):
            return int(fields[7]) == os.getuid()
    return False
