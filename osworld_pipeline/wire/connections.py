"""The HTTP connections of a server: uvicorn's protocol with limits. It disconnects clients that do not finish a
request's head, send an endless one, do not read their answer, or exceed the number of connections."""

import asyncio
import math
import resource
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from osworld_pipeline.wire import ErrorMessage, Fault

MAX_HEAD_BYTES = 64 * 1024
MIN_READ_BYTES = 64 * 1024
"""Bytes of its answer that a client must read within `slow_client_s`."""
LINGER_S = 1.0
"""How long a client may continue to send after its answer."""
MAX_DROPPED_BYTES = 8 * 1024 * 1024
"""How many bytes a client may send in LINGER_S: over loopback one second is enough for a gigabyte."""


class ClientFiles:
    """Open files of this process that belong to clients, at all of its ports: at most half of the limit. The other half
    is needed to call, reset and grade desktops."""

    def __init__(self, most: float) -> None:
        self.num_open, self.most = 0, most

    @classmethod
    def half(cls) -> Self:
        """Half of the number of files that this process may open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(math.inf if limit == resource.RLIM_INFINITY else limit // 2)

    @property
    def are_too_many(self) -> bool:
        return self.num_open > self.most

    @property
    def leave_no_time(self) -> bool:
        """Whether refused connections must be closed at once. Otherwise they stay open briefly, so that the client
        receives its answer."""
        return self.num_open > self.most * 1.25


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of one process; its servers share the object."""

    max_connections: int
    slow_client_s: float
    """Limit from the start of waiting for a request to the end of its head; and for reading MIN_READ_BYTES of an
    answer, or its remainder."""
    keep_alive_s: float
    """How long a connection may stay open after an answer without another request."""
    files: ClientFiles = field(default_factory=ClientFiles.half)


def bounded_config(app: ASGIApp, limits: ConnectionLimits, *, shutdown_grace_s: int, **options: Any) -> uvicorn.Config:
    """Settings shared by all our servers. `options`: uvicorn's own."""
    return uvicorn.Config(
        app,
        http=type("BoundedProtocol", (_Bounded,), {"limits": limits}),
        ws="none",
        proxy_headers=False,  # otherwise any local program could claim any client address
        access_log=False,  # a URL may contain a token
        log_config=None,
        server_header=False,
        timeout_keep_alive=int(limits.keep_alive_s) or 1,
        timeout_graceful_shutdown=shutdown_grace_s,
        **options,
    )


class _Bounded(cast("type[Any]", AutoHTTPProtocol)):
    limits: ConnectionLimits
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _num_dropped = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        files = self.limits.files
        files.num_open += 1
        super().connection_made(_LingeringTransport(transport, self.limits.slow_client_s, is_short=files.leave_no_time))
        most = self.limits.max_connections
        if len(self.connections) > most:
            self._disconnect(503, f"there are already {most} connections; try again later")
            return
        if files.are_too_many:
            self._disconnect(503, f"clients already hold {files.most:g} open files of this server; try again later")
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        if self.transport.is_closing():
            self._stop_timer()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self._num_head_bytes = 0
        else:
            self._take_part(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.limits.files.num_open -= 1
        super().connection_lost(exc)

    def _take_part(self, num_bytes: int) -> None:
        """Part of a head, or of the rest of a body that is no longer read."""
        self._num_head_bytes += num_bytes
        is_head = self.cycle is None or not self.cycle.more_body
        if is_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._stop_timer()
            self._disconnect(431, f"the head is larger than {MAX_HEAD_BYTES} bytes; send less")
        elif self._head_timer is None:
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self.limits.slow_client_s, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._disconnect(408, f"no request was complete within {self.limits.slow_client_s:g} s")

    def _disconnect(self, status: int, sentence: str) -> None:
        self.transport.write(raw_error(status, sentence))
        self.transport.close()
        self.connections.discard(self)  # frees its place immediately

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _LingeringTransport:
    """Closes in two steps: further data from the client is read and dropped for a moment; otherwise the kernel would
    answer it with a reset, and the client might never receive its answer. A client that does not read its answer is
    disconnected. `is_short` closes in one step."""

    def __init__(self, transport: asyncio.Transport, slow_client_s: float, *, is_short: bool) -> None:
        self._transport, self._slow_client_s, self._is_short = transport, slow_client_s, is_short
        self._is_closing = False
        self._num_written = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self.get_extra_info, self.pause_reading = transport.get_extra_info, transport.pause_reading
        self.set_protocol, self.abort = transport.set_protocol, transport.abort

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        self._num_written += len(data)
        if self._read_timer is None:
            self._expect_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._is_closing or self._transport.is_closing():
            return
        self._is_closing = True
        if self._is_short or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def _expect_reading(self) -> None:
        """Applies to data that the kernel has not accepted; its own buffers are large and drain without us."""
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting == 0:
            self._read_timer = None
            return
        wanted = self._num_written - num_waiting + min(num_waiting, MIN_READ_BYTES)
        loop = asyncio.get_running_loop()
        self._read_timer = loop.call_later(self._slow_client_s, self._check_reading, wanted)

    def _check_reading(self, wanted: int) -> None:
        if self._num_written - self._transport.get_write_buffer_size() < wanted:
            self._transport.abort()
        else:
            self._expect_reading()


def raw_error(status: int, sentence: str) -> bytes:
    """A complete HTTP answer, for a connection that is closed before any application handles it."""
    fault: Fault = "no_capacity" if status == 503 else "client_error"
    body = ErrorMessage(error=sentence, fault=fault).model_dump_json().encode()
    retry = "Retry-After: 2\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{retry}\r\n"
    )
    return head.encode() + body
