"""OSWorld's guest protocol over HTTP, with only the standard library: dispatches requests to the other modules."""

import contextlib
import errno
import json
import socket
import socketserver
import sys
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, parse_qsl, urlsplit

from .message_bus import DisabledError

MAX_BODY_BYTES = 512 * 1024 * 1024
NO_ROOM_LIMIT_S = 0.2
_NO_ROOM = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def failure_status(error: OSError) -> int:
    """507 if processes, memory or disk space are used up; 503 for any other failure."""
    return 507 if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT) else 503


class Reply:
    """The answer of a route: a status and JSON, text or bytes."""

    def __init__(self, body: Any, *, status: int = 200, content_type: str | None = None) -> None:
        if isinstance(body, bytes):
            self.data, kind = body, "application/octet-stream"
        elif isinstance(body, str):
            self.data, kind = body.encode(), "text/plain; charset=utf-8"
        else:
            self.data, kind = json.dumps(body).encode(), "application/json"
        self.status, self.content_type = status, content_type or kind


class StreamReply(Reply):
    """Bytes that come one after another; their end closes the connection."""

    def __init__(self, parts: Generator[bytes, None, None]) -> None:
        super().__init__(b"")
        self.parts = parts


class Request:
    """A parsed request; `fields` are the fields of the JSON or form body. Those of a multipart body are bytes."""

    def __init__(self, query: dict[str, str], fields: dict[str, Any]) -> None:
        self.query, self.fields = query, fields

    def text(self, name: str) -> str:
        """A required field. Raises ValueError if it is missing."""
        value = self.fields.get(name)
        if isinstance(value, bytes):
            value = value.decode()
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} is required")
        return value


Route = Callable[[Request], Reply]


class Routes(Protocol):
    def find(self, method: str, path: str) -> Route | None: ...


class GuestServer(ThreadingHTTPServer):
    """Serves on a socket that is already listening, so a client may connect before the desktop is up and is answered as
    soon as it is."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, routes: Routes) -> None:
        socketserver.BaseServer.__init__(self, ("guest", 0), _Handler)
        self.socket = listener
        self.routes = routes

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started
            with contextlib.suppress(OSError):
                request.settimeout(NO_ROOM_LIMIT_S)
                request.recv(65536)  # or closing the socket would discard the answer
                request.sendall(_NO_ROOM)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects early is no fault."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = self.socket.accept()
        return connection, ("host", 0)


class _Handler(BaseHTTPRequestHandler):
    server: GuestServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write per answer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the requests come from the host."""

    def _answer(self, method: str) -> None:
        """400 to 404: the request is wrong. 410: programs of the desktop have disabled a service that answers. 500:
        the command in the request is wrong. 503: the desktop failed. 507: programs of the desktop have used up
        processes, memory or disk space."""
        try:
            reply = self._reply(method)
        except DisabledError as error:
            reply = Reply({"status": "error", "error": str(error)}, status=410)
        except ValueError as error:
            reply = Reply({"status": "error", "error": str(error)}, status=400)
        except (FileNotFoundError, NotADirectoryError) as error:
            reply = Reply({"status": "error", "error": f"no such file: {error.filename}"}, status=404)
        except PermissionError as error:
            reply = Reply({"status": "error", "error": f"not readable: {error.filename}"}, status=403)
        except OSError as error:
            status = 400 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else failure_status(error)
            reply = Reply({"status": "error", "error": f"{type(error).__name__}: {error}"}, status=status)
        except Exception as error:  # noqa: BLE001 - the boundary: every error is reported to the host
            reply = Reply({"status": "error", "error": f"{type(error).__name__}: {error}"}, status=503)
        if isinstance(reply, StreamReply):
            return self._stream(reply)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.data)))
        self.end_headers()
        self.wfile.write(reply.data)

    def _stream(self, reply: StreamReply) -> None:
        with contextlib.closing(reply.parts):
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Connection", "close")
            self.end_headers()
            for part in reply.parts:
                self.wfile.write(part)
                self.wfile.flush()

    def _reply(self, method: str) -> Reply:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            return Reply({"status": "error", "error": "the body is too long"}, status=413)
        body = self.rfile.read(length)
        url = urlsplit(self.path)
        route = self.server.routes.find(method, url.path)
        if route is None:
            return Reply({"status": "error", "error": f"no route {method} {url.path}"}, status=404)
        fields = parse_body(self.headers.get("Content-Type") or "", body)
        return route(Request(dict(parse_qsl(url.query)), fields))


def parse_body(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a JSON, form or multipart body. ValueError if it is malformed."""
    if not body:
        return {}
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _parse_multipart(content_type, body)
    if kind == "application/x-www-form-urlencoded":
        return {key: values[0] for key, values in parse_qs(body.decode(), keep_blank_values=True).items()}
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("the body must be a JSON object")
    return fields


def _parse_multipart(content_type: str, body: bytes) -> dict[str, Any]:
    _, found, boundary = content_type.partition("boundary=")
    if not found:
        raise ValueError("multipart body without a boundary")
    mark = b"--" + boundary.partition(";")[0].strip().strip('"').encode()
    fields: dict[str, Any] = {}
    for part in (b"\r\n" + body).split(b"\r\n" + mark)[1:-1]:
        head, found_head, data = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = _parameter(head.decode("utf-8", "replace"), "name")
        if not found_head or name is None:
            raise ValueError("multipart part without a name")
        fields[name] = data
    return fields


def _parameter(head: str, name: str) -> str | None:
    for line in head.splitlines():
        if line.lower().startswith("content-disposition:"):
            for item in line.split(";")[1:]:
                key, _, value = item.strip().partition("=")
                if key == name:
                    return value.strip('"')
    return None
