"""Intervals of success rates: the Wilson score interval if episodes are independent, and the bootstrap over tasks if
several episodes are samples of one task."""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist

NUM_RESAMPLES = 2_000


class IntervalMethod(StrEnum):
    WILSON = "wilson"
    """Every task has one sample, so that the samples are independent."""
    BOOTSTRAP = "bootstrap"
    """Percentiles over tasks drawn again, each with all its samples (Efron and Tibshirani 1993, chapters 8 and 13)."""
    WILSON_OVER_TASKS = "wilson_over_tasks"
    """All tasks have the same rate, so a bootstrap would have no width: each task counts as one observation."""
    NONE = "none"
    """No observation: 0..1."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float
    method: IntervalMethod


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of episodes."""

    successes: int
    n: int
    """The denominator."""
    interval: Interval

    @property
    def value(self) -> float:
        """NaN without an episode."""
        return self.successes / self.n if self.n else math.nan


def wilson_interval(successes: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a binomial proportion by inverting the score test (Wilson 1927, JASA 22(158):209-212):

        (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n),  z the normal quantile of (1 + confidence)/2

    It stays inside 0..1 and is accurate for small n, and for 0 or n successes, unlike the usual p ± z·s.e.
    Without observations it is (0, 1).

    Raises:
        ValueError: not 0 <= successes <= n, or a confidence outside 0..1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes}, but must be 0 to {n}")
    z = _quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + spread) / scale)
    return low, high


def interval_over_tasks(
    sums: Sequence[float],
    counts: Sequence[int],
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The bootstrap interval over tasks of the ratio sum(sums)/sum(counts). A task's samples stay together, because
    they are not independent tasks; if all tasks have the same rate, each counts as one observation of it.

    `sums`: by task, the sum of its samples' rewards; `counts`: by task, the number of its samples, each worth 0..1.

    Raises:
        ValueError: a task has no sample, or a sum above its number of samples.
    """
    if any(not (count > 0 and 0 <= total <= count) for total, count in zip(sums, counts, strict=True)):
        raise ValueError("each task must have at least one sample, each worth 0 to 1")
    if not sums:
        return Interval(low=0.0, high=1.0, method=IntervalMethod.NONE)
    rate = sums[0] / counts[0]
    if all(math.isclose(total / count, rate, abs_tol=1e-12) for total, count in zip(sums, counts, strict=True)):
        low, high = wilson_interval(rate * len(sums), len(sums), confidence=confidence)
        return Interval(low=low, high=high, method=IntervalMethod.WILSON_OVER_TASKS)
    drawn = [
        sum(map(sums.__getitem__, chosen)) / sum(map(counts.__getitem__, chosen))
        for chosen in draw_again(len(sums), num_resamples, seed)
    ]
    low, high = percentiles(drawn, confidence)
    return Interval(low=low, high=high, method=IntervalMethod.BOOTSTRAP)


@lru_cache(maxsize=4)
def draw_again(num_tasks: int, num_resamples: int, seed: int) -> tuple["array[int]", ...]:
    """Indices of `num_tasks` tasks drawn with replacement; cached, because a leaderboard repeats the same draws."""
    rng = random.Random(seed)
    return tuple(array("L", rng.choices(range(num_tasks), k=num_tasks)) for _ in range(num_resamples))


def rate_over_tasks(samples: Sequence[Sequence[bool]], *, confidence: float = 0.95) -> Rate:
    """The pooled share of true samples; `samples`: by task, and a task may have none.

    Its interval is Wilson's if no task has two samples, else that of `interval_over_tasks`.
    """
    played = [task for task in samples if task]
    n = sum(map(len, played))
    successes = sum(map(sum, played))
    if played and n == len(played):
        low, high = wilson_interval(successes, n, confidence=confidence)
        interval = Interval(low=low, high=high, method=IntervalMethod.WILSON)
    else:
        interval = interval_over_tasks(list(map(sum, played)), list(map(len, played)), confidence=confidence)
    return Rate(successes=successes, n=n, interval=interval)


def percentiles(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The percentiles that cut off (1 - confidence)/2 of the values on each side, with linear interpolation."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, but must be between 0 and 1")
    ordered = sorted(values)
    tail = (1.0 - confidence) / 2
    return _between(ordered, tail), _between(ordered, 1.0 - tail)


def _between(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, but must be between 0 and 1")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def student_quantile(confidence: float, degrees: int) -> float:
    """The value that |t|, for Student's t with `degrees` degrees of freedom, exceeds with probability 1 - confidence.

    The distribution in closed form (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4) is inverted by bisection.

    Raises:
        ValueError: no degree of freedom, or a confidence outside 0..1.
    """
    if degrees < 1:
        raise ValueError(f"degrees is {degrees}, but must be at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, but must be between 0 and 1")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_share(angle: float, degrees: int) -> float:
    """The probability that |t| is below sqrt(degrees)·tan(angle)."""
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for step in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= step / (step + 1) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
