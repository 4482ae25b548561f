"""Estimates from several samples of a task: pass@k, at least one of k tries succeeds, and pass^k, all k succeed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.evaluation.intervals import (
    Interval,
    IntervalMethod,
    interval_over_tasks,
    wilson_interval,
)

Estimator = Callable[[int, int, int], float]
"""Arguments: the number of samples of a task, the successes among them, and k."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks with equal weights."""

    k: int
    value: float
    """NaN if no task has k samples."""
    interval: Interval
    num_tasks: int
    """Tasks with at least k samples, which the mean is over."""
    num_short: int
    """Tasks with fewer samples, which are left out."""


def pass_at_k(n: int, num_successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples succeeds, from `n` samples of a task:

        pass@k = 1 - C(n - c, k) / C(n, k)

    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1). The similar 1 - (1 - c/n)^k is
    too low.

    Raises:
        ValueError: not 0 <= successes <= n, or not 1 <= k <= n.
    """
    _check(n, num_successes, k)
    return 1.0 - math.comb(n - num_successes, k) / math.comb(n, k)


def pass_hat_k(n: int, num_successes: int, k: int) -> float:
    """Unbiased estimate of the probability that all of k samples succeed, from `n` samples of a task:

        pass^k = C(c, k) / C(n, k)

    (Yao et al. 2024, "τ-bench", section 3: a measure of reliability).

    Raises:
        ValueError: not 0 <= successes <= n, or not 1 <= k <= n.
    """
    _check(n, num_successes, k)
    return math.comb(num_successes, k) / math.comb(n, k)


def estimate_over_tasks(
    samples: Mapping[str, Sequence[bool]], k: int, estimator: Estimator, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The mean over the tasks with at least k samples. Its interval is that of `interval_over_tasks`, or Wilson's if
    each of them has one sample (k = 1).

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}, but must be at least 1")
    long_enough = [task for task in samples.values() if len(task) >= k]
    values = [estimator(len(task), sum(task), k) for task in long_enough]
    if values and all(len(task) == 1 for task in long_enough):
        low, high = wilson_interval(sum(values), len(values), confidence=confidence)
        interval = Interval(low=low, high=high, method=IntervalMethod.WILSON)
    else:
        interval = interval_over_tasks(values, [1] * len(values), confidence=confidence, seed=seed)
    return Estimate(
        k=k,
        value=sum(values) / len(values) if values else math.nan,
        interval=interval,
        num_tasks=len(values),
        num_short=len(samples) - len(values),
    )


def _check(n: int, num_successes: int, k: int) -> None:
    if not 0 <= num_successes <= n:
        raise ValueError(f"num_successes is {num_successes}, but must be 0 to {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, but must be 1 to {n}")
