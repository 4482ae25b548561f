"""Decide whether a difference between a checkpoint and the start of its training is an effect of that training.

The rule: the paired test over the tasks shows a difference; it is larger than the spread of the start's own evaluations
from seed to seed; and it holds across training runs with different seeds. One run alone never shows an effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from osworld_pipeline.evaluation.comparison import Comparison, Verdict
from osworld_pipeline.evaluation.intervals import student_quantile

MIN_RUNS = 3
"""Training runs of an effect: with two, the spread between runs is hardly known."""
ONE_RUN = "A single training run is one training seed: it proves no general effect."
RULE = (
    "A difference is called an effect if the paired test over the tasks shows it, if it is larger than the "
    f"spread of the start's own evaluations, and if at least {MIN_RUNS} training runs with different seeds agree. "
    f"{ONE_RUN}"
)
"""A text below every table of changes."""


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """Variation of the success rate of one checkpoint between evaluation seeds."""

    rates: tuple[float, ...]
    """Rate of each seed, over the same tasks; at least two."""
    half_width: float
    """Two evaluations of the same checkpoint, with this number of seeds each, differ by at most this, at the
    confidence: t·s·sqrt(2/k), for k seeds with standard deviation s."""

    @classmethod
    def of(cls, rates: Sequence[float], *, confidence: float = 0.95) -> "SeedSpread | None":
        """None for fewer than two seeds: the spread is then unknown."""
        k = len(rates)
        if k < 2:
            return None
        half_width = student_quantile(confidence, k - 1) * stdev(rates) * math.sqrt(2 / k)
        return cls(rates=tuple(rates), half_width=half_width)

    @classmethod
    def widest(cls, spreads: "Sequence[SeedSpread | None]") -> "SeedSpread | None":
        """The widest of several starts; None if one is unknown."""
        known = [spread for spread in spreads if spread is not None]
        return max(known, key=lambda one: one.half_width) if known and len(known) == len(spreads) else None

    def band(self, rate: float) -> tuple[float, float]:
        """The range around the checkpoint's rate that another evaluation of it would fall in."""
        return max(0.0, rate - self.half_width), min(1.0, rate + self.half_width)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The verdict on a difference."""

    comparison: Comparison
    """Paired by task, over all runs."""
    run_differences: tuple[float, ...]
    """Difference of each training run."""
    across_runs: tuple[float, float] | None
    """Student's interval of their mean; None below MIN_RUNS."""
    half_width: float | None
    """Half width of the start's spread; None if the spread of a start is unknown."""
    verdict: Verdict
    is_effect: bool
    missing: tuple[str, ...]
    """Reasons why it is not an effect, one clause each; empty for an effect."""

    @property
    def words(self) -> str:
        """A sentence for people; it always names the number of runs."""
        num_runs = len(self.run_differences)
        runs = "one run" if num_runs == 1 else f"{num_runs} runs"
        return f"effect over {runs}: {self.verdict}" if self.is_effect else f"{runs}: {self.verdict}"


def judge_effect(
    comparison: Comparison, *, spread: SeedSpread | None, run_differences: Sequence[float] | None = None
) -> Effect:
    """`spread`: that of the start, or the widest of several starts. `run_differences`: of each training run, with other
    seeds; None for one run, whose difference is that of `comparison`."""
    differences = tuple(run_differences or (comparison.difference,))
    across = _across(differences, comparison.confidence)
    missing = []
    if comparison.verdict is Verdict.NOT_SHOWN:
        missing.append("the paired test shows no difference")
    if spread is not None and abs(comparison.difference) <= spread.half_width:
        missing.append("it is within the spread of the start's own evaluations")
    if len(differences) > 1 and _disagree(comparison.difference, across or (min(differences), max(differences))):
        missing.append("the runs disagree")
    verdict = Verdict.NOT_SHOWN if missing else comparison.verdict
    if spread is None:
        missing.append("the start's spread is unknown: it needs two evaluation seeds")
    if len(differences) < MIN_RUNS:
        missing.append(f"an effect needs {MIN_RUNS} training runs")
    return Effect(
        comparison=comparison,
        run_differences=differences,
        across_runs=across,
        half_width=spread.half_width if spread else None,
        verdict=verdict,
        is_effect=not missing,
        missing=tuple(missing),
    )


def _across(differences: Sequence[float], confidence: float) -> tuple[float, float] | None:
    if len(differences) < MIN_RUNS:
        return None
    mean = fmean(differences)
    half = student_quantile(confidence, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return mean - half, mean + half


def _disagree(difference: float, interval: tuple[float, float]) -> bool:
    """The interval over runs, or the range of two runs, does not exclude the other side of 0."""
    low, high = interval
    return not (low > 0.0 if difference > 0.0 else high < 0.0)
