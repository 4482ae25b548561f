"""The Prometheus metrics: counts of everything that ends, durations, and the state of pool and table at scrape time.
Their names are declared in osworld_pipeline/wire/metric_families.py."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from env_server.episodes.table import EpisodeEnd, EpisodeTable
from osworld_pipeline.wire import Fault
from osworld_pipeline.wire import metric_families as families
from osworld_pipeline.wire.traffic import method_label

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
STEP_PARTS = ("act", "observe", "encode")


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
        self._ended = families.SERVER_ENDED.meter(self.registry)
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        self._steps = families.SERVER_STEPS.meter(self.registry)
        self._faults = families.SERVER_FAULTS.meter(self.registry)
        self._requests = families.SERVER_REQUESTS.meter(self.registry)
        self._bytes = families.SERVER_BYTES.meter(self.registry)
        parts = families.SERVER_STEP_SECONDS.meter(self.registry)
        self._timings = {part: parts.labels(part) for part in STEP_PARTS} | {
            "reset": families.SERVER_RESET_SECONDS.meter(self.registry),
            "evaluate": families.SERVER_EVALUATE_SECONDS.meter(self.registry),
            "queue": families.SERVER_QUEUE_SECONDS.meter(self.registry),
        }

    def watch(self, episodes: EpisodeTable) -> None:
        """Starts to export the state of this table and of its pool."""
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
        self._requests.labels(method_label(passed.method), passed.route or "none", str(passed.status)).inc()
        self._bytes.inc(passed.num_bytes)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
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
        yield families.SERVER_OPENED.reading(episodes.num_opened)
        yield families.SERVER_LIVE.reading(len(episodes))
        yield families.SERVER_CALLS.reading(episodes.num_calls)
        yield families.SERVER_QUEUE.reading(pool.num_waiting)
        states = families.SERVER_REPLICAS.reading()
        counts = pool.count_states()
        for state in STATES:
            states.add_metric((state,), counts[state])
        yield states
        yield families.SERVER_STARTS.reading(sum(replica.num_starts for replica in replicas))
        yield families.SERVER_FAILURES.reading(sum(replica.num_failures for replica in replicas))
        yield families.SERVER_LEASES.reading(sum(replica.num_served for replica in replicas))
