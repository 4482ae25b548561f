"""Intervals and p-values against an independent implementation."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from osworld_pipeline.evaluation.comparison import compare_paired, sign_flip_p_value
from osworld_pipeline.evaluation.intervals import (
    interval_over_tasks,
    percentiles,
    student_quantile,
    wilson_interval,
)

CONFIDENCES = st.floats(0.5, 0.999)


@given(counts=st.integers(1, 2_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), confidence=CONFIDENCES)
@settings(deadline=None)
def test_the_wilson_interval_is_scipys(counts: tuple[int, int], confidence: float) -> None:
    found = stats.binomtest(*counts).proportion_ci(confidence, method="wilson")
    assert wilson_interval(*counts, confidence=confidence) == pytest.approx((found.low, found.high), abs=1e-9)


@given(degrees=st.integers(1, 200), confidence=CONFIDENCES)
@settings(deadline=None)
def test_students_quantile_is_scipys(degrees: int, confidence: float) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-7)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), confidence=CONFIDENCES)
def test_percentiles_are_numpys(values: list[float], confidence: float) -> None:
    shares = [(1 - confidence) / 2, (1 + confidence) / 2]
    assert percentiles(values, confidence) == pytest.approx(tuple(np.quantile(values, shares)), rel=1e-9, abs=1e-6)


def test_the_bootstrap_over_tasks_equals_scipys_up_to_random_draws() -> None:
    rng = random.Random(3)
    counts = [rng.randint(1, 8) for _ in range(80)]
    sums = [sum(rng.random() < rate for _ in range(count)) for count, rate in zip(counts, _rates(rng, 80), strict=True)]
    ours = interval_over_tasks(sums, counts, num_resamples=20_000)
    found = stats.bootstrap(
        (sums, counts),
        lambda drawn, sizes, axis: drawn.sum(axis=axis) / sizes.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((found.low, found.high), abs=0.005)
    assert found.high - found.low > 0.1, "the tolerance is a small part of the width"


def test_the_interval_of_a_paired_difference_equals_scipys_up_to_random_draws() -> None:
    rng = random.Random(4)
    before = {f"t{number}": [float(rng.random() < rate)] * 2 for number, rate in enumerate(_rates(rng, 60))}
    after = {task: [float(rng.random() < 0.7) for _ in range(2)] for task in before}
    ours = compare_paired(before, after, num_resamples=20_000)
    differences = [np.mean(after[task]) - np.mean(before[task]) for task in sorted(before)]
    found = stats.bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    assert ours.difference == pytest.approx(float(np.mean(differences)))
    assert (ours.low, ours.high) == pytest.approx((found.low, found.high), abs=0.01)
    assert found.high - found.low > 0.2, "the tolerance is a small part of the width"


@given(differences=st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=10))
@settings(max_examples=30, deadline=None)
def test_the_sign_flip_test_is_scipys_over_all_signs(differences: list[float]) -> None:
    # Exact: there are at most 1,024 signs.
    found = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=2_000, alternative="two-sided"
    )
    assert sign_flip_p_value(differences) == pytest.approx(min(1.0, found.pvalue), abs=1e-12)


@given(gains=st.integers(0, 40), losses=st.integers(0, 40))
@settings(deadline=None)
def test_with_one_sample_per_task_the_p_value_is_that_of_a_binomial_test(gains: int, losses: int) -> None:
    expected = stats.binomtest(gains, gains + losses).pvalue if gains + losses else 1.0
    assert sign_flip_p_value([1.0] * gains + [-1.0] * losses + [0.0]) == pytest.approx(expected, abs=1e-12)
    assert not math.isnan(expected)


def _rates(rng: random.Random, count: int) -> list[float]:
    return [rng.random() for _ in range(count)]
