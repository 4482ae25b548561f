"""Serves the metrics of a process at `/metrics`, if OSWORLD_METRICS names an address. Off by default.

`OSWORLD_METRICS=[HOST:]PORT`, where PORT is a number, a range (`9500-9599`: the first free port) or 0 (any free port).
Without a host it is 127.0.0.1. A host other than loopback needs OSWORLD_METRICS_TOKEN, which every scrape sends as a
bearer token.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from osworld_pipeline.errors import DependencyError, PipelineError
from osworld_pipeline.wire.bearer import Secret
from osworld_pipeline.wire.cross_site import is_from_here, is_loopback
from osworld_pipeline.wire.listening import listen_on

log = logging.getLogger(__name__)

VARIABLE = "OSWORLD_METRICS"
TOKEN_VARIABLE = "OSWORLD_METRICS_TOKEN"  # noqa: S105 - the variable's name, not a token
PATH = "/metrics"
CLIENT_LIMIT_S = 5.0
"""For each read from a client, and each write to it."""
MAX_CLIENTS = 8
POLL_S = 0.1
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsSettingError(PipelineError):
    """OSWORLD_METRICS is not valid, or would serve a network without a token."""


@dataclass(frozen=True, kw_only=True)
class MetricsAddress:
    host: str
    ports: range
    """The first free one is used."""
    token: str | None = field(default=None, repr=False)
    reached_at: str = ""
    """The host by which Prometheus reaches it; empty: `host`, or the machine's name for all addresses."""


def metrics_address(environment: Mapping[str, str] | None = None) -> MetricsAddress | None:
    """None if this process serves no metrics. `environment`: None for this process's own.

    Raises:
        MetricsSettingError: the setting is not valid.
    """
    given = os.environ if environment is None else environment
    text = given.get(VARIABLE, "").strip()
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    first, is_range, last = port.partition("-")
    try:
        ports = range(int(first), int(last if is_range else first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 0 or ports[-1] > 65535:
        raise MetricsSettingError(
            f"{VARIABLE} is {text!r}: it must be [HOST:]PORT, where PORT is a number, a range such as 9500-9599, or 0 "
            "for any free port"
        )
    token = given.get(TOKEN_VARIABLE, "").strip() or None
    if token is None and not is_loopback(host):
        raise MetricsSettingError(
            f"refusing to serve metrics on {host} without a token: set {TOKEN_VARIABLE}, or name no host in {VARIABLE}"
        )
    return MetricsAddress(host=host, ports=ports, token=token)


@contextmanager
def metrics_server(address: MetricsAddress, text: Callable[[], bytes]) -> Iterator[str]:
    """Serves `text()` from a thread until the block ends. Yields HOST:PORT, as Prometheus reaches it.

    Raises:
        DependencyError: no port is free.
    """
    server = _Server(_listener(address), text, address.token)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield _target(address, server.socket.getsockname()[1])
    finally:
        server.shutdown()  # waits for POLL_S, and not for clients
        server.server_close()


def _listener(address: MetricsAddress) -> socket.socket:
    error: OSError | None = None
    for port in address.ports:
        try:
            return listen_on(address.host, port)
        except OSError as refused:
            error = refused
    ports = f"{address.ports[0]}-{address.ports[-1]}" if len(address.ports) > 1 else str(address.ports[0])
    raise DependencyError(
        f"no metrics are served: {address.host} port {ports} cannot be used "
        f"({error.strerror if error else 'no port'}); name a range or 0 in {VARIABLE}"
    ) from error


def _target(address: MetricsAddress, port: int) -> str:
    everywhere = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    host = address.reached_at or (socket.gethostname() if address.host in everywhere else address.host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, text: Callable[[], bytes], token: str | None) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.text, self.secret = text, None if token is None else Secret(token)
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a defect, and nothing for a client that has gone."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("the metrics cannot be read", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_LIMIT_S
    server_version, sys_version = "osworld", ""

    def do_GET(self) -> None:
        headers = {name.lower().encode(): value.encode("latin-1", "replace") for name, value in self.headers.items()}
        assert isinstance(self.server, _Server), "no other server uses this handler"
        secret = self.server.secret
        if secret is None and not is_from_here(headers):
            sentence = f"without {TOKEN_VARIABLE} only programs on this machine are answered, at a loopback address"
            self._answer(HTTPStatus.FORBIDDEN, f"{sentence}\n".encode())
        elif secret is not None and not secret.is_in(headers.get(b"authorization", b"")):
            self._answer(HTTPStatus.UNAUTHORIZED, f"send {TOKEN_VARIABLE} as a bearer token\n".encode())
        elif self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}\n".encode())
        else:
            self._answer(HTTPStatus.OK, self.server.text())

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: scrapes would fill the program's log."""
