"""Paired comparison of two checkpoints on the same tasks, with a bootstrap over tasks."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import compress

from osworld_pipeline.evaluation.intervals import draw_again, percentiles

_MAX_DENOMINATOR = 1_000
_MAX_TOTAL = 50_000
"""Limit for the exact test: the sum of the differences in units of their common denominator."""
_NUM_FLIPS = 5_000


class Verdict(StrEnum):
    """The values are shown to people."""

    BETTER = "better"
    WORSE = "worse"
    NOT_SHOWN = "no significant difference"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Success rates, and their difference `after` - `before`, as fractions of 1."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    """Percentile interval of the difference."""
    p_value: float
    """Two-sided, of the sign-flip test: the probability of a difference at least this large by chance, if a task's
    samples could as well have come from the other checkpoint."""
    num_tasks: int
    confidence: float

    @property
    def verdict(self) -> Verdict:
        return Verdict.BETTER if self.is_better else Verdict.WORSE if self.is_worse else Verdict.NOT_SHOWN

    @property
    def is_better(self) -> bool:
        """The whole interval is above 0, and the difference is significant by the sign-flip test. The interval
        alone is not enough: with a single task, or a few that gained equally, it has no width."""
        return self.low > 0.0 and self._is_no_chance

    @property
    def is_worse(self) -> bool:
        """The same as `is_better`, below 0."""
        return self.high < 0.0 and self._is_no_chance

    @property
    def _is_no_chance(self) -> bool:
        # 1 - 0.95 is a little more than 0.05.
        return self.p_value <= round(1.0 - self.confidence, 9)


def compare_paired(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Paired bootstrap over tasks (Efron and Tibshirani 1993, chapter 16: whole units are resampled), and the sign-flip
    test of the same differences (Fisher 1935, The Design of Experiments, section 21).

    `before`, `after`: by task, the rewards of its samples, 0..1. Only common tasks count. A task's samples are
    averaged first, because they are not independent tasks: the interval covers the variation of the difference over
    other tasks like these.

    Raises:
        ValueError: no task in common, or a task has no sample.
    """
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        raise ValueError("the two evaluations have no task in common")
    if not all(before[task] and after[task] for task in tasks):
        raise ValueError("a task has no sample")
    pairs = [(_mean(before[task]), _mean(after[task])) for task in tasks]
    differences = [right - left for left, right in pairs]
    drawn = [
        sum(map(differences.__getitem__, chosen)) / len(differences)
        for chosen in draw_again(len(differences), num_resamples, seed)
    ]
    low, high = percentiles(drawn, confidence)
    return Comparison(
        before=_mean([left for left, _ in pairs]),
        after=_mean([right for _, right in pairs]),
        difference=_mean(differences),
        low=low,
        high=high,
        p_value=sign_flip_p_value(differences, seed=seed),
        num_tasks=len(tasks),
        confidence=confidence,
    )


def sign_flip_p_value(differences: Sequence[float], *, seed: int = 0) -> float:
    """The share of all sign assignments of the differences whose sum is at least as far from 0 as the observed one.

    Exact if the differences have a small common denominator, as those of success rates have: with one sample a task it
    is McNemar's exact test. Otherwise it is estimated from random draws, and the observed one counts as a draw.
    """
    fractions = [Fraction(abs(difference)).limit_denominator(_MAX_DENOMINATOR) for difference in differences]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    sizes = [int(fraction * scale) for fraction in fractions if fraction]
    signed = sum(
        math.copysign(size, d) for size, d in zip((int(f * scale) for f in fractions), differences, strict=True)
    )
    is_exact = all(
        math.isclose(fraction, abs(difference), abs_tol=1e-9)
        for fraction, difference in zip(fractions, differences, strict=True)
    )
    if not is_exact or sum(sizes) > _MAX_TOTAL:
        return _drawn_p_value([abs(difference) for difference in differences], abs(sum(differences)), seed)
    observed = abs(int(signed))
    if observed == 0:
        return 1.0
    # The product of (1 + x^size) counts the ways to reach each sum of the positive terms. It is stored as one integer
    # whose digits, in a base above every count, are the counts; the digit sum is the remainder modulo the base minus 1.
    num_bits = len(sizes) + 2
    ways = 1
    for size in sizes:
        ways += ways << (size * num_bits)
    low_end = (sum(sizes) - observed) // 2 + 1
    reached = (ways & ((1 << (low_end * num_bits)) - 1)) % ((1 << num_bits) - 1)
    return 2 * reached / (1 << len(sizes))


def _drawn_p_value(sizes: Sequence[float], observed: float, seed: int) -> float:
    rng = random.Random(seed)
    total = sum(sizes)
    reached = 1
    for _ in range(_NUM_FLIPS):
        signed = 2 * sum(compress(sizes, rng.choices((0, 1), k=len(sizes)))) - total
        reached += abs(signed) >= observed - 1e-9
    return reached / (_NUM_FLIPS + 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
