"""Reduces the CPU weight of a desktop that uses far more CPU time than the others. Equal weights give each desktop an
equal part of the processors, but a desktop that spins uses all of its part, and the others wait for theirs at every
step. With a small weight it gets only the CPU time that they leave."""

import asyncio
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

INTERVAL_S = 4.0
MOST_TIMES_MEDIAN = 4.0
"""A desktop that used more than this many times the median CPU time of the others gets a small weight."""
FLOOR_CPUS = 0.5
FLOOR_EQUAL_PARTS = 2.0
"""A desktop keeps its weight if it uses no more processors than the smaller of these two: FLOOR_CPUS, or
FLOOR_EQUAL_PARTS equal parts of all processors."""
SMALL_WEIGHT = 1 / 8
"""1/32 was too small: on a busy machine a guest agent did not answer within 70 s, and a hostile episode ended as a
fault."""
FIRST_S, LONGEST_S = 8.0, 256.0
"""How long a small weight lasts the first time, and at most; it lasts twice as long each further time."""


class CpuGroup(Protocol):
    """The control group of one desktop's programs."""

    def cpu_time_s(self) -> float | None: ...

    def weigh_cpu(self, part: float) -> None: ...


K = TypeVar("K", bound=CpuGroup)


@dataclass
class _Record:
    used_s: float
    num_times: int = 0
    small_until: float | None = None


class CpuShares(Generic[K]):
    """Decides on the weights of one server's groups; `now` is any monotonic clock."""

    def __init__(self, num_cpus: int | None = None) -> None:
        self._num_cpus = num_cpus or os.cpu_count() or 1
        self._records: dict[K, _Record] = {}
        self._judged_at: float | None = None

    def judge(self, used_s: Mapping[K, float], now: float) -> dict[K, float]:
        """New weights, from the CPU time of each group since it was made. Groups that are gone are forgotten."""
        passed_s = 0.0 if self._judged_at is None else now - self._judged_at
        uses = {key: used_s[key] - record.used_s for key, record in self._records.items() if key in used_s}
        self._judged_at = now
        self._records = {key: self._records.get(key, _Record(used)) for key, used in used_s.items()}
        weights: dict[K, float] = {}
        for key, record in self._records.items():
            record.used_s = used_s[key]
            if record.small_until is not None and now >= record.small_until:
                record.small_until = None
                weights[key] = 1.0
            if record.small_until is None and key in uses and self._is_greedy(key, uses, passed_s):
                record.small_until = now + min(LONGEST_S, FIRST_S * 2**record.num_times)
                record.num_times += 1
                weights[key] = SMALL_WEIGHT
        return weights

    def _is_greedy(self, key: K, uses: Mapping[K, float], passed_s: float) -> bool:
        others = [used for other, used in uses.items() if other is not key]
        floor_cpus = min(FLOOR_CPUS, FLOOR_EQUAL_PARTS * self._num_cpus / len(uses))
        if not others or uses[key] <= floor_cpus * passed_s:
            return False
        return uses[key] > MOST_TIMES_MEDIAN * statistics.median(others)


async def share_cpus(groups: Callable[[], Iterable[CpuGroup]], *, interval_s: float = INTERVAL_S) -> None:
    """Runs until cancelled."""
    shares, clock = CpuShares[CpuGroup](), asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(interval_s)
        try:
            await asyncio.to_thread(_weigh, shares, list(groups()), clock())
        except OSError as error:
            log.warning("the CPU weights of desktops cannot be set this time: %s", error)


def _weigh(shares: CpuShares[CpuGroup], groups: list[CpuGroup], now: float) -> None:
    used_s = {group: used for group in groups if (used := group.cpu_time_s()) is not None}
    for group, part in shares.judge(used_s, now).items():
        group.weigh_cpu(part)
