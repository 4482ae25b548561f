"""CPU of the HTTP client for one request, where many wait for their answers at the same time: the transport of our
clients against httpx's own, one pool of connections."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from rich.console import Console

from benchmarks.spread import Spread, print_table, verdict
from osworld_pipeline.wire.http_pools import PooledTransport

CONCURRENT = (8, 64, 256)
NUM_REQUESTS = 4
"""Sequential requests of each caller."""
LATENCY_S = 0.5
RATIO_BAR = 5.0
"""How many times as much the single pool takes at the largest number."""
_BODY = b'{"text": "' + b"a" * 20_000 + b'"}'
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
TRANSPORTS: Mapping[str, Callable[[], httpx.AsyncBaseTransport]] = {
    "one pool": lambda: httpx.AsyncHTTPTransport(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
    ),
    "pools of a few": PooledTransport,
}


def run_requests(console: Console, *, rounds: int) -> list[dict[str, Any]]:
    found = {
        (name, count): Spread.of(asyncio.run(_cpu_ms(make(), count)) for _ in range(rounds))
        for count in CONCURRENT
        for name, make in TRANSPORTS.items()
    }
    ratios = {count: found["one pool", count].median / found["pools of a few", count].median for count in CONCURRENT}
    rows = [
        [f"{count}", *(found[name, count].range_text(2) for name in TRANSPORTS), f"{ratios[count]:.1f}"]
        for count in CONCURRENT
    ]
    title = "CPU of the client for a request, in ms"
    print_table(console, title, ["concurrent requests", *TRANSPORTS, "ratio"], rows)
    most = max(CONCURRENT)
    console.print(f"at {most} at least {RATIO_BAR:g} times: {verdict(ratios[most] >= RATIO_BAR)}")
    return [
        {"bench": "requests", "transport": name, "concurrent": count, "cpu_ms": spread.fields()}
        for (name, count), spread in found.items()
    ]


async def _cpu_ms(transport: httpx.AsyncBaseTransport, concurrent: int) -> float:
    """CPU time of one request, with the server's share, which is the same for both."""
    async with _serving() as url, httpx.AsyncClient(transport=transport, trust_env=False, timeout=120) as http:

        async def call() -> None:
            await asyncio.sleep(random.uniform(0, 2 * LATENCY_S))
            for _ in range(NUM_REQUESTS):
                (await http.post(url, json={"action": "wait"})).raise_for_status()

        before = time.process_time()
        await asyncio.gather(*(call() for _ in range(concurrent)))
        return 1e3 * (time.process_time() - before) / (concurrent * NUM_REQUESTS)


@asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0, backlog=4096)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/step"


class _Answering(asyncio.Protocol):
    """Answers each request after a while. The bodies of the requests end with `}`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            asyncio.get_running_loop().call_later(LATENCY_S, self._answer)

    def _answer(self) -> None:
        if isinstance(self._transport, asyncio.WriteTransport) and not self._transport.is_closing():
            self._transport.write(_ANSWER)
