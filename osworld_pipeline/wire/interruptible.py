"""A server of a command: it ends at Ctrl-C or SIGTERM."""

import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn


class InterruptibleServer(uvicorn.Server):
    """SIGINT ends it without a traceback; uvicorn's own server raises the signal again after the shutdown."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        """`ready`: is called once it listens."""
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
