"""A real S3 server in this process (moto's server mode), which fails when a test says so."""

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKET = "bucket"


@dataclass
class S3:
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    """Method and path of each."""
    failures: list[tuple[str, int, int]] = field(default_factory=list)
    """(pattern of method and path, status, how often); status 0 drops the connection."""
    on_request: Callable[[str], None] = lambda request: None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secretsecret",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def num_uploads(self) -> int:
        return sum(request.startswith("PUT ") for request in self.requests)


class _Failing:
    def __init__(self, app: Any, s3: S3) -> None:
        self._app, self._s3, self._lock = app, s3, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        with self._lock:
            self._s3.requests.append(request)
            status = self._failure(request)
        self._s3.on_request(request)
        if status is None:
            return self._app(environ, start_response)
        if status == 0:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        start_response(f"{status} Injected", [("Content-Length", "0")])
        return []

    def _failure(self, request: str) -> int | None:
        for number, (pattern, status, times) in enumerate(self._s3.failures):
            if re.match(pattern, request) and times > 0:
                self._s3.failures[number] = (pattern, status, times - 1)
                return status
        return None


@contextmanager
def serve_s3() -> Iterator[S3]:
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None: ...

    s3 = S3()
    app = _Failing(DomainDispatcherApplication(create_backend_app), s3)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    s3.endpoint = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        boto3.client(
            "s3", endpoint_url=s3.endpoint, aws_access_key_id="key", aws_secret_access_key="secretsecret",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)  # fmt: skip
        s3.requests.clear()
        yield s3
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
