"""Whether one checkpoint is better than another: both play the same tasks, and the tasks are drawn again."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of success rates, `after` less `before`; shares of 1, not percent."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    """Percentile interval of the difference."""
    num_tasks: int

    @property
    def is_better(self) -> bool:
        """The whole interval lies above 0."""
        return self.low > 0.0


def compare_paired(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Paired bootstrap over tasks (Efron and Tibshirani 1993, chapter 16: whole units are resampled).

    `before`, `after`: by task, the rewards of its samples, 0..1. Only tasks that both have count. A task's samples are
    averaged first, because they are no independent tasks: the interval says how the difference would vary over other
    tasks like these.

    Raises:
        ValueError: no task in common, or a task without a sample.
    """
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        raise ValueError("the two have no task in common")
    if not all(before[task] and after[task] for task in tasks):
        raise ValueError("a task without a sample")
    pairs = [(_mean(before[task]), _mean(after[task])) for task in tasks]
    differences = [right - left for left, right in pairs]
    rng = random.Random(seed)
    drawn = sorted(_mean(rng.choices(differences, k=len(differences))) for _ in range(num_resamples))
    tail = (1.0 - confidence) / 2
    return Comparison(
        before=_mean([left for left, _ in pairs]),
        after=_mean([right for _, right in pairs]),
        difference=_mean(differences),
        low=_quantile(drawn, tail),
        high=_quantile(drawn, 1.0 - tail),
        num_tasks=len(tasks),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
