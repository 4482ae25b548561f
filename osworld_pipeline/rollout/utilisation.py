"""The share of the time in which environments, engine and trainer are busy, since the last call and since the start.

Environments: replicas with an episode / replicas. Engine: time with at least one request. Trainer: time in an update.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.task import Task
from osworld_pipeline.protocols import GenerateRequest, GenerateResult, PolicyEngine
from osworld_pipeline.rollout.run_episode import EpisodePlan, RunEpisode

Clock = Callable[[], float]
"""Seconds from an arbitrary start."""


@dataclass(frozen=True, kw_only=True)
class BusyReading:
    capacity: int
    num_busy: int
    """May exceed the capacity."""
    unit_s: float
    """Seconds in which a unit was busy, summed over the units."""


class BusyMeter:
    """The number of busy units of `capacity`, summed over time. Other threads may call `read`, whose seconds never
    fall."""

    def __init__(self, capacity: int, *, clock: Clock = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._started = clock()
        self._last: tuple[float, int, float] = (self._started, 0, 0.0)
        """The last change: its time, the number of busy units since then, and the busy seconds of units up to it."""
        self._lock = threading.Lock()
        """Guards `_last`. The clock is read under this lock, so that no reading is earlier than the last change."""
        self._marked: tuple[float, float] = (self._started, 0.0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One more unit is busy in this block."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def shares(self) -> tuple[float, float]:
        """Shares in 0..1: since the last call of this method, and since the start."""
        now, _, unit_s = self._change(0)
        (marked_at, marked_s), self._marked = self._marked, (now, unit_s)
        return self._share(now - marked_at, unit_s - marked_s), self._share(now - self._started, unit_s)

    def read(self) -> BusyReading:
        with self._lock:
            _, num_busy, unit_s = self._until(self._clock())
        return BusyReading(capacity=self._capacity, num_busy=num_busy, unit_s=unit_s)

    def _share(self, elapsed_s: float, unit_s: float) -> float:
        return unit_s / (elapsed_s * self._capacity) if elapsed_s > 0 else 0.0

    def _change(self, difference: int) -> tuple[float, int, float]:
        with self._lock:
            now, num_busy, unit_s = self._until(self._clock())
            self._last = now, num_busy + difference, unit_s
            return self._last

    def _until(self, now: float) -> tuple[float, int, float]:
        changed, num_busy, unit_s = self._last
        return now, num_busy, unit_s + (now - changed) * min(num_busy, self._capacity)


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    environments: BusyMeter
    engine: BusyMeter = field(default_factory=lambda: BusyMeter(1))
    trainer: BusyMeter = field(default_factory=lambda: BusyMeter(1))

    def metrics(self) -> dict[str, float]:
        """`*_busy` since the last call, `*_busy_overall` since the start; 0..1."""
        found: dict[str, float] = {}
        for name in ("environments", "engine", "trainer"):
            since_last, overall = getattr(self, name).shares()
            found |= {f"{name}_busy": since_last, f"{name}_busy_overall": overall}
        return found


def metered(run_one: RunEpisode, meter: BusyMeter) -> RunEpisode:
    """The same function; a unit of `meter` is busy while an episode runs."""

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        with meter.busy():
            return await run_one(task, plan)

    return run


class MeteredEngine:
    """Wraps an engine; its meter runs while it answers."""

    def __init__(self, engine: PolicyEngine, meter: BusyMeter) -> None:
        self.name = engine.name
        self.uses_chat_api = engine.uses_chat_api
        self._engine = engine
        self._meter = meter

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        with self._meter.busy():
            return await self._engine.generate(request)

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        await self._engine.load_weights(path, policy_version=policy_version)

    async def forget(self, episode_id: str) -> None:
        await self._engine.forget(episode_id)

    async def health(self) -> None:
        await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()
