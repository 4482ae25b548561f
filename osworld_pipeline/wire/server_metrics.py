"""The metrics of a server that has no others: its requests, served at an address of their own if OSWORLD_METRICS asks
for them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from osworld_pipeline.errors import DependencyError
from osworld_pipeline.wire import metric_families as families
from osworld_pipeline.wire.metrics_endpoint import PATH, metrics_address, metrics_server
from osworld_pipeline.wire.traffic import Traffic, method_label

log = logging.getLogger(__name__)

Readings = Callable[[], Iterable[Metric]]
"""What else is read at a scrape, in a thread of its own."""


@dataclass(frozen=True, kw_only=True)
class ObservedServer:
    app: ASGIApp
    target: str = ""
    """HOST:PORT of its metrics; empty if none are served."""


@contextmanager
def observed_server(app: ASGIApp, readings: Readings = tuple) -> Iterator[ObservedServer]:
    """Serves the metrics of the application until the block ends, if they are asked for. If they cannot be served, the
    log says why and the server runs without.

    Raises:
        MetricsSettingError: the setting is not valid.
    """
    address = metrics_address()
    if address is None:
        yield ObservedServer(app=app)
        return
    metrics = ServerMetrics(readings)
    with ExitStack() as stack:
        observed = ObservedServer(app=app)
        try:
            target = stack.enter_context(metrics_server(address, metrics.text))
        except DependencyError as error:
            log.warning("%s", error)
        else:
            log.info("metrics: http://%s%s", target, PATH)
            observed = ObservedServer(app=metrics.observed(app), target=target)
        yield observed


class ServerMetrics(Collector):
    """Has its own registry."""

    def __init__(self, readings: Readings = tuple) -> None:
        self._registry = registry = CollectorRegistry()
        self._readings = readings
        self._requests = families.REQUESTS.meter(registry)
        self._seconds = families.REQUEST_SECONDS.meter(registry)
        self._sent = families.SENT_BYTES.meter(registry)
        self._received = families.RECEIVED_BYTES.meter(registry)
        registry.register(self)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._readings()

    def observed(self, app: ASGIApp) -> ASGIApp:
        """The same application; its requests are counted."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            traffic = Traffic(receive, send)
            try:
                await app(scope, traffic.receive, traffic.send)
            finally:
                route = _route_of(scope)
                self._requests.labels(method_label(scope["method"]), route, str(traffic.status)).inc()
                self._seconds.labels(route).observe(traffic.seconds)
                self._sent.labels(route).inc(traffic.num_sent)
                self._received.labels(route).inc(traffic.num_received)

        return observed


def _route_of(scope: Scope) -> str:
    """The name of the function that answered; `none` if no route matched or the request was refused before."""
    endpoint = scope.get("endpoint")
    return "none" if endpoint is None else str(getattr(endpoint, "__name__", type(endpoint).__name__))
