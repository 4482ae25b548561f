"""What is counted of each HTTP request that a server answers."""

import time
from typing import Any

from starlette.types import Message, Receive, Send

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Traffic:
    """Stands between server and application for one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._start = time.perf_counter()
        self.status = 499
        """499 until an answer is sent."""
        self.num_received = self.num_sent = 0
        """Bytes of the bodies."""

    async def receive(self) -> Message:
        message = await self._receive()
        self.num_received += len(message.get("body", b""))
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.num_sent += len(message.get("body", b""))
        await self._send(message)

    @property
    def seconds(self) -> float:
        """Time since the request arrived."""
        return time.perf_counter() - self._start


def method_label(method: str) -> str:
    """The method, or `other`: a client must not make new label values."""
    return method if method in METHODS else "other"
