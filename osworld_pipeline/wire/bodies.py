"""Limits the size and the minimum speed of request bodies."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

BYTES_PER_S = 64 * 1024
"""The minimum speed of a body after its first seconds."""


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    max_bytes: int
    slow_client_s: float = 10.0
    """How long a body may take before the minimum speed applies."""

    @property
    def too_large(self) -> str:
        return f"the request is larger than {self.max_bytes} bytes; send less"

    def allows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Returns False if the announced body is too large or has no valid size. The connection must then be closed,
        because otherwise the rest of the body would have to be read before the next request."""
        length = headers.get(b"content-length", b"0")
        return length.isdigit() and len(length) <= 18 and int(length) <= self.max_bytes

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Reads the whole body.

        Raises:
            HTTPException: 408 if it is too slow; 413 if it is too large.
        """
        if not self.allows(headers):
            raise HTTPException(413, self.too_large)
        body, bounded = b"", self.bounded(receive)
        while True:
            message = await bounded()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return body

    def bounded(self, receive: Receive) -> Receive:
        """`receive` that raises HTTPException 408 or 413 if the body is too slow or too large."""
        num_bytes, is_body_over, start = 0, False, time.monotonic()

        async def bounded() -> Message:
            nonlocal num_bytes, is_body_over
            if is_body_over:
                return await receive()
            limit_s = self.slow_client_s + num_bytes / BYTES_PER_S
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + start + limit_s - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, f"the body did not arrive within {limit_s:.0f} s; send it faster", {"Connection": "close"}
                ) from error
            num_bytes += len(message.get("body", b""))
            is_body_over = not message.get("more_body", False)
            if num_bytes > self.max_bytes:
                raise HTTPException(413, self.too_large, {"Connection": "close"})
            return message

        return bounded
