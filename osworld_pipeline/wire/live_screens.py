"""The stream of live screens, from an env server to a page or to the viewer, and from the viewer to a page: records of
4 bytes with the length of a JSON object, that object (`replica`, `size`), and a JPEG of that size."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from osworld_pipeline.errors import EnvServerError

LIVE_TYPE = "application/x-live-screens"
STREAM_S = 300.0
"""A stream ends after this time, and its page opens the next one. So no connection stays open without limit, and a
changed token takes effect."""
END_GRACE_S = 2.0
SMALL_WIDTH, LARGE_WIDTH = 480, 1280
"""Pixels of a screen in a grid, and of an enlarged one."""
MAX_HEAD_BYTES = 4096
MAX_PICTURE_BYTES = 8 * 1024 * 1024
_JPEG_START = b"\xff\xd8\xff"


def screen_record(replica: str, picture: bytes) -> bytes:
    head = json.dumps({"replica": replica, "size": len(picture)}).encode()
    return len(head).to_bytes(4, "big") + head + picture


async def read_screen_records(parts: AsyncIterable[bytes]) -> AsyncGenerator[tuple[str, bytes], None]:
    """The replica and the JPEG of each record.

    Raises:
        EnvServerError: the bytes are no such records.
    """
    held = bytearray()
    async for part in parts:
        held += part
        while (found := _take_record(held)) is not None:
            yield found


def _take_record(held: bytearray) -> tuple[str, bytes] | None:
    """Removes the first record; None while it is not complete."""
    if len(held) < 4:
        return None
    start = 4 + int.from_bytes(held[:4], "big")
    if start > MAX_HEAD_BYTES:
        raise EnvServerError(f"the stream of screens has a head of {start - 4:,} bytes; is this an env server?")
    if len(held) < start:
        return None
    replica, size = _read_head(bytes(held[4:start]))
    if len(held) < start + size:
        return None
    picture = bytes(held[start : start + size])
    del held[: start + size]
    if not picture.startswith(_JPEG_START):
        raise EnvServerError(f"the stream of screens has a picture of {replica[:64]!r} that is no JPEG")
    return replica, picture


def _read_head(head: bytes) -> tuple[str, int]:
    try:
        found = json.loads(head)
        replica, size = found["replica"], found["size"]
    except (ValueError, TypeError, KeyError):
        replica, size = None, None
    if not isinstance(replica, str) or not isinstance(size, int) or not 0 < size <= MAX_PICTURE_BYTES:
        raise EnvServerError(
            "the stream of screens has a head without a replica or a valid size; is this an env server?"
        )
    return replica, size


class LiveResponse(StreamingResponse):
    """Ends also if its client does not read."""

    def __init__(self, records: AsyncGenerator[bytes, None]) -> None:
        super().__init__(records, media_type=LIVE_TYPE, headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_S + END_GRACE_S):
                await super().__call__(scope, receive, send)
