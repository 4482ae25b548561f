"""HTTP by hand, for what no client library sends: requests that are slow, huge, half-sent or no requests at all."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RawAnswer:
    status: int
    """0 where the connection was closed without an answer."""
    head: bytes
    body: bytes

    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


async def answer_to(port: int, *pieces: bytes, every_s: float = 0.0, limit_s: float = 10.0) -> RawAnswer:
    """The answer until the server closes the connection, which it must do within the limit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_s)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(limit_s):
            answer = await reader.read()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return RawAnswer(status=int(head.split()[1]) if head else 0, head=head, body=body)


def get(path: str, **headers: str) -> bytes:
    """A request that makes the server close the connection after its answer."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


async def until(holds: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - what is waited for is in another process or library
            await asyncio.sleep(0.01)
