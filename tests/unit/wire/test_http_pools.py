"""Hundreds of concurrent requests use small pools, and connections are used again."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from osworld_pipeline.wire import http_pools
from osworld_pipeline.wire.http_pools import POOL_SIZE, PooledTransport

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"


class Server:
    """A server that answers a request once `go_on` is set and closes the connection of a request to /broken."""

    def __init__(self) -> None:
        self.go_on, self.num_connections, self.num_open, self.url = asyncio.Event(), 0, 0, ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self.go_on.wait()
                if b"/broken" in head:
                    break
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.num_open -= 1
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    listening = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield found
    listening.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=PooledTransport()) as http:
        yield http


def num_pools(client: httpx.AsyncClient) -> int:
    assert isinstance(client._transport, PooledTransport)
    (pools,) = [found for (_, _, port), found in client._transport._pools.items() if port != 1]
    return len(pools)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - a condition of the client's own state
            await asyncio.sleep(0.01)


async def test_concurrent_requests_share_small_pools_and_only_the_first_pool_stays(
    server: Server, client: httpx.AsyncClient
) -> None:
    count = 5 * POOL_SIZE + 1
    calls = [asyncio.create_task(client.get(server.url)) for _ in range(count)]
    await until(lambda: server.num_connections == count)
    assert num_pools(client) == 6
    server.go_on.set()
    assert {(await call).text for call in calls} == {"body"}
    assert num_pools(client) == 1
    await until(lambda: server.num_open <= POOL_SIZE)


async def test_a_connection_is_used_again(server: Server, client: httpx.AsyncClient) -> None:
    server.go_on.set()
    for _ in range(10):
        assert (await client.get(server.url)).text == "body"
    assert server.num_connections == 1


async def test_a_pool_stays_while_a_body_is_read(
    server: Server, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pools, "POOL_SIZE", 1)
    server.go_on.set()
    async with client.stream("GET", server.url) as first, client.stream("GET", server.url) as second:
        assert num_pools(client) == 2
        assert await second.aread() == b"body"
        assert num_pools(client) == 1
        assert await first.aread() == b"body"


async def test_broken_cancelled_and_impossible_requests_leave_their_pool(
    server: Server, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pools, "POOL_SIZE", 1)
    waiting = asyncio.create_task(client.get(server.url))
    broken = asyncio.create_task(client.get(f"{server.url}/broken"))
    await until(lambda: server.num_connections == 2)
    with pytest.raises(httpx.ConnectError):
        await client.get("http://127.0.0.1:1")
    waiting.cancel()
    server.go_on.set()
    with pytest.raises(httpx.RemoteProtocolError):
        await broken
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert num_pools(client) == 1
    assert {pool.num_requests for pools in client._transport._pools.values() for pool in pools} == {0}
    assert (await client.get(server.url)).text == "body"
