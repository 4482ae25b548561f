"""A guest on an unnamed Unix socket, lent to TCP programs: all bytes, for a limited time, and not to other users."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from env_server.guest_client import GuestClient
from env_server.tcp_forward import tcp_forward
from osworld_pipeline.errors import ReplicaError

BODY = os.urandom(3_000_000)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request with the body that it had, then hangs up."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next((line for line in head.split("\r\n") if line.startswith("content-length:")), "x: 0")
    body = await reader.readexactly(int(length.split(":")[1]))
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
    writer.close()


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[GuestClient]:
    path = str(tmp_path / "s")
    server = await asyncio.start_unix_server(echo, path)
    async with GuestClient.over_unix_socket(path, name="g") as client:
        yield client
    server.close()


async def test_guest_answers_on_a_port_while_it_is_lent_and_not_after(guest: GuestClient) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        async with tcp_forward(guest) as (host, port):
            answers = await asyncio.gather(*(http.post(f"http://{host}:{port}/x", content=BODY) for _ in range(3)))
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://{host}:{port}/x")
    assert host == "127.0.0.1"
    assert all(answer.content == BODY for answer in answers)


async def test_open_connections_end_with_the_loan(guest: GuestClient) -> None:
    async with tcp_forward(guest) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /x HTTP/1.1\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_guest_that_is_gone_closes_the_callers_connection(tmp_path: Path) -> None:
    async with (
        GuestClient.over_unix_socket(str(tmp_path / "nobody"), name="g") as guest,
        tcp_forward(guest) as (host, port),
        httpx.AsyncClient(trust_env=False) as http,
    ):
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await http.get(f"http://{host}:{port}/x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can call as somebody else")
async def test_other_users_of_this_machine_get_nothing(guest: GuestClient) -> None:
    program = (
        "import encodings.idna, os, socket, sys; os.setuid(54321);"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5);"
        "s.sendall(b'GET /x HTTP/1.1\\r\\n\\r\\n'); print(len(s.recv(100)))"
    )
    async with tcp_forward(guest) as (_, port):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-Ic", program, str(port)], capture_output=True, timeout=20, check=False
        )
    assert done.stdout == b"0\n" or b"ConnectionResetError" in done.stderr


async def test_guest_on_tcp_is_lent_at_its_own_address() -> None:
    async with (
        GuestClient.over_tcp("http://10.0.0.7:5000", name="g") as guest,
        tcp_forward(guest) as address,
    ):
        assert address == ("10.0.0.7", 5000)


async def test_guest_without_an_address_for_other_programs_is_not_lent() -> None:
    async with GuestClient(httpx.AsyncClient(), name="g") as guest:
        with pytest.raises(ReplicaError, match="cannot be forwarded"):
            async with tcp_forward(guest):
                raise AssertionError("it must not come to this")
