"""A collector of traces on this machine: it takes OTLP over HTTP and keeps the spans."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from osworld_pipeline.wire import tracing
from osworld_pipeline.wire.tracing import ids_of


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    trace_id: int
    span_id: int
    parent_id: int
    """0 without a parent."""
    attributes: dict[str, Any]
    seconds: float
    error: str
    """The message of the exception that ended it; empty without one."""


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def tree(self, episode_id: str) -> list[str]:
        """The spans of the episode's trace, each with its ancestors: `episode/attempt/reset`. A span whose parent is
        not in the trace starts with `?`."""
        trace_id, _ = ids_of(episode_id)
        spans = {one.span_id: one for one in self.spans if one.trace_id == trace_id}

        def path(one: Span) -> str:
            if one.parent_id == 0:
                return one.name
            return f"{path(spans[one.parent_id]) if one.parent_id in spans else '?'}/{one.name}"

        return [path(one) for one in spans.values()]

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for one in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.append(
                    Span(
                        name=one.name,
                        service=service,
                        trace_id=int.from_bytes(one.trace_id, "big"),
                        span_id=int.from_bytes(one.span_id, "big"),
                        parent_id=int.from_bytes(one.parent_span_id, "big"),
                        attributes=_attributes(one.attributes),
                        seconds=(one.end_time_unix_nano - one.start_time_unix_nano) / 1e9,
                        error=one.status.message,
                    )
                )


@contextmanager
def collecting_traces() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


@contextmanager
def tracing_to(url: str) -> Iterator[None]:
    """This process sends its traces to that URL, only by `tracing.flush`: a background thread that sends them would use
    `random`, which property tests do not allow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        patch.setattr(tracing, "_service", "")
        tracing._provider.cache_clear()
        tracing.start_tracing("test")
        yield
        tracing._provider().shutdown()
        tracing._provider.cache_clear()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
