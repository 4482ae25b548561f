"""A client that asks for a large answer and does not read it is disconnected; one that reads slowly is not."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn
from raw_http import get, until
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from osworld_pipeline.wire.connections import ConnectionLimits, bounded_config
from osworld_pipeline.wire.listening import listen_on

SLOW_S = 0.5
SIZE = 24 * 1024 * 1024
"""More than the kernel buffers for a connection."""


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(bytes(SIZE))(scope, Request(scope, receive).receive, send)


@pytest.fixture
async def server() -> AsyncIterator[uvicorn.Server]:
    limits = ConnectionLimits(max_connections=4, slow_client_s=SLOW_S, keep_alive_s=1.0)
    server = uvicorn.Server(bounded_config(answer, limits, shutdown_grace_s=1, lifespan="off"))
    with listen_on("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.01)
        yield server
        server.should_exit = True
        await serving


async def ask(server: uvicorn.Server, *, head: bytes) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, server.servers[0].sockets[0].getsockname())
    await loop.sock_sendall(client, head)
    return client


@pytest.mark.parametrize("head", [get("/"), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_client_that_does_not_read_its_answer_is_disconnected(server: uvicorn.Server, head: bytes) -> None:
    clients = [await ask(server, head=head) for _ in range(4)]
    await until(lambda: len(server.server_state.connections) == 4)
    await until(lambda: not server.server_state.connections)
    for client in clients:
        client.close()


async def test_client_that_reads_slowly_has_its_whole_answer(server: uvicorn.Server) -> None:
    client = await ask(server, head=get("/"))
    num_bytes, start = 0, time.monotonic()
    while piece := await asyncio.get_running_loop().sock_recv(client, 1024 * 1024):
        num_bytes += len(piece)
        await asyncio.sleep(0.08)
    client.close()
    assert num_bytes > SIZE
    assert time.monotonic() - start > 2 * SLOW_S, "it took longer than a client may do nothing"
