"""The Prometheus metrics: counts of everything that ends, durations, and the state of pool and table at scrape time.
Label values come only from short lists, never from a request."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from env_server.episodes.table import EpisodeEnd, EpisodeTable
from osworld_pipeline.wire import Fault

STATES = ("starting", "warm", "leased", "resetting", "failed")
OUTCOMES = (
    "evaluated",
    "closed",
    "idle",
    "client_gone",
    "shutdown",
    "env_fault",
    "grader_fault",
    "tampering",
    "touched",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
STEP_PARTS = ("act", "observe", "encode")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Passed:
    """One request that has been answered, or whose client disconnected before."""

    method: str
    route: str
    """The route's template, so that ids do not create new values; empty where no route matched."""
    path: str
    status: int
    """499 where no answer was sent."""
    num_bytes: int
    seconds: float


class Metrics:
    """Has its own registry: two applications in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "env_server_episodes_ended", "Episodes that are over, by outcome.", ("outcome",), registry=self.registry
        )
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        self._steps = Counter("env_server_steps", "Steps executed.", registry=self.registry)
        self._faults = Counter(
            "env_server_failed_answers", "Answers that name a fault.", ("fault",), registry=self.registry
        )
        self._requests = Counter(
            "env_server_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._bytes = Counter("env_server_sent_bytes", "Bytes of answers' bodies.", registry=self.registry)
        parts = Histogram(
            "env_server_step_seconds", "Parts of a step: act (with its pause), observe, encode.", ("part",),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._timings = {part: parts.labels(part) for part in STEP_PARTS} | {
            name: Histogram(f"env_server_{name}_seconds", help_text, buckets=SECONDS, registry=self.registry)
            for name, help_text in (
                ("reset", "A task's set-up on a fresh desktop."),
                ("evaluate", "Grading."),
                ("queue", "Waiting for a free replica, for requests that got one."),
            )
        }

    def watch(self, episodes: EpisodeTable) -> None:
        """From now on the state of this table and of its pool is also exported."""
        self.registry.register(_State(episodes))

    def ended(self, end: EpisodeEnd) -> None:
        self._ended.labels(end.outcome).inc()

    def timed(self, part: str, seconds: float) -> None:
        self._timings[part].observe(seconds)
        if part == "act":
            self._steps.inc()

    def failed(self, fault: Fault) -> None:
        self._faults.labels(fault).inc()

    def passed(self, passed: Passed) -> None:
        method = passed.method if passed.method in METHODS else "other"
        self._requests.labels(method, passed.route or "none", str(passed.status)).inc()
        self._bytes.inc(passed.num_bytes)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _State(Collector):
    def __init__(self, episodes: EpisodeTable) -> None:
        self._episodes = episodes

    def describe(self) -> Iterator[Metric]:
        """Empty: the families depend on the pool, which may not have started."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        episodes, pool = self._episodes, self._episodes.pool
        replicas = pool.replicas
        yield CounterMetricFamily(
            "env_server_episodes_opened", "Episodes that got a desktop.", value=episodes.num_opened
        )
        yield GaugeMetricFamily("env_server_episodes_live", "Episodes open now.", value=len(episodes))
        yield GaugeMetricFamily("env_server_calls", "Calls in progress.", value=episodes.num_calls)
        yield GaugeMetricFamily("env_server_queue_length", "Clients' resets waiting.", value=pool.num_waiting)
        states = GaugeMetricFamily("env_server_replicas", "Replicas by state.", labels=("state",))
        counts = pool.count_states()
        for state in STATES:
            states.add_metric((state,), counts[state])
        yield states
        for name, text, value in (
            ("starts", "Desktops started.", sum(replica.num_starts for replica in replicas)),
            ("failures", "Desktops that failed to start or to reset, or died.", sum(r.num_failures for r in replicas)),
            ("leases", "Leases that are over.", sum(replica.num_served for replica in replicas)),
        ):
            yield CounterMetricFamily(f"env_server_replica_{name}", text, value=value)
