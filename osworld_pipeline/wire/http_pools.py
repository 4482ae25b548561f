"""A transport for hundreds of concurrent requests. httpcore looks at every connection of a pool at the start and at the
end of each request, so a request among 300 in one pool takes many times the CPU of one in a small pool
(`python -m benchmarks.bench_rollout requests`)."""

from collections.abc import AsyncIterator
from itertools import chain

import httpx

from osworld_pipeline.wire.certificates import trusted_certificates

POOL_SIZE = 8
"""Concurrent requests of a pool."""


class _Pool:
    def __init__(self, transport: httpx.AsyncHTTPTransport, siblings: list["_Pool"]) -> None:
        """`siblings`: the pools of its server."""
        self.transport, self.num_requests = transport, 0
        self._siblings = siblings

    async def leave(self) -> None:
        """Ends one request."""
        self.num_requests -= 1
        if not self.num_requests and self is not self._siblings[0]:
            self._siblings.remove(self)
            await self.transport.aclose()


class PooledTransport(httpx.AsyncBaseTransport):
    """A request takes the first pool of its server with room, or a new one; a pool is closed after its last request,
    except the first. So the connections of few requests are used again, and those of many do not stay open."""

    def __init__(self) -> None:
        self._verify = trusted_certificates()
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=POOL_SIZE)
        self._pools: dict[tuple[str, str, int | None], list[_Pool]] = {}
        """Pools by scheme, host and port."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        pools = self._pools.setdefault((url.scheme, url.host, url.port), [])
        pool = next((one for one in pools if one.num_requests < POOL_SIZE), None)
        if pool is None:
            pool = _Pool(httpx.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=self._limits), pools)
            pools.append(pool)
        pool.num_requests += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            await pool.leave()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(pool, response.stream)
        return response

    async def aclose(self) -> None:
        for pool in chain.from_iterable(self._pools.values()):
            await pool.transport.aclose()


class _Stream(httpx.AsyncByteStream):
    """The body of a response. Its request uses the pool until it is closed."""

    def __init__(self, pool: _Pool, stream: httpx.AsyncByteStream) -> None:
        self._pool, self._stream = pool, stream
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._stream.aclose()
        finally:
            await self._pool.leave()
