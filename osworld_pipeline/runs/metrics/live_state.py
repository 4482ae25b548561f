"""Metrics that are read at a scrape: meters of utilisation, env servers as a client sees them, groups in progress."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from osworld_pipeline.rollout.async_collector import AsynchronousCollector
from osworld_pipeline.rollout.engines.http_calls import shown
from osworld_pipeline.rollout.env_fleet import EnvFleet, ServerState
from osworld_pipeline.rollout.utilisation import BusyMeter
from osworld_pipeline.wire import metric_families as families

Thing = TypeVar("Thing")


class Watched(Generic[Thing]):
    """Things that are read at a scrape. The tuple is replaced as a whole, because a scrape has a thread of its own."""

    def __init__(self) -> None:
        self.things: tuple[Thing, ...] = ()

    @contextmanager
    def watching(self, thing: Thing) -> Iterator[None]:
        self.things += (thing,)
        try:
            yield
        finally:
            self.things = tuple(one for one in self.things if one is not thing)


class LiveState(Collector):
    """Use it from one thread; `collect` may run in another one."""

    def __init__(self) -> None:
        self.fleets: Watched[EnvFleet] = Watched()
        self.collectors: Watched[AsynchronousCollector] = Watched()
        self._meters: tuple[tuple[tuple[str, BusyMeter], ...], dict[str, float]] = ((), {})
        """By part: the meters that run, and the busy seconds of those before them."""
        self._lock = threading.Lock()
        """Prevents a reading of a meter after its last one was added to the past seconds: a counter would fall."""

    @contextmanager
    def watching_meter(self, part: str, meter: BusyMeter) -> Iterator[None]:
        """Within the block the meter is exported; the seconds that it has counted remain."""
        with self._lock:
            meters, past_s = self._meters
            self._meters = ((*meters, (part, meter)), {part: 0.0, **past_s})
        try:
            yield
        finally:
            with self._lock:
                meters, past_s = self._meters
                left = tuple(one for one in meters if one[1] is not meter)
                self._meters = (left, {**past_s, part: past_s[part] + meter.read().unit_s})

    def describe(self) -> Iterator[Metric]:
        """Empty: the families depend on what is watched."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._utilisation()
        yield from self._env_servers()
        collectors = self.collectors.things
        groups = families.GROUPS.reading()
        groups.add_metric(("running",), sum(one.num_running for one in collectors))
        groups.add_metric(("waiting",), sum(one.num_waiting for one in collectors))
        yield groups

    def _utilisation(self) -> Iterator[Metric]:
        busy, capacity = families.BUSY_UNITS.reading(), families.CAPACITY.reading()
        seconds = families.BUSY_SECONDS.reading()
        with self._lock:
            meters, past_s = self._meters
            readings_of = {part: [meter.read() for name, meter in meters if name == part] for part in past_s}
        for part, before_s in past_s.items():
            readings = readings_of[part]
            busy.add_metric((part,), sum(one.num_busy for one in readings))
            capacity.add_metric((part,), sum(one.capacity for one in readings))
            seconds.add_metric((part,), before_s + sum(one.unit_s for one in readings))
        yield from (busy, capacity, seconds)

    def _env_servers(self) -> Iterator[Metric]:
        servers = [server for fleet in self.fleets.things for server in fleet.servers]
        states = Counter(server.state for server in servers)
        by_state = families.ENV_SERVERS.reading()
        for state in ServerState:
            by_state.add_metric((state,), states[state])
        yield by_state
        for family, values in (
            (families.ENV_DESKTOPS, [server.num_replicas for server in servers]),
            (families.ENV_FREE, [max(0, server.free or 0) for server in servers]),
            (families.ENV_IN_USE, [server.num_in_use for server in servers]),
            (families.ENV_WAITING, [server.num_waiting for server in servers]),
        ):
            reading, sums = family.reading(), Counter[str]()
            for server, value in zip(servers, values, strict=True):
                sums[shown(server.url)] += value
            for url, value in sums.items():
                reading.add_metric((url,), value)
            yield reading
