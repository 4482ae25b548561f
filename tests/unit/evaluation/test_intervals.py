"""Intervals against numbers computed by hand and against the score test itself."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.intervals import (
    IntervalMethod,
    interval_over_tasks,
    percentiles,
    rate_over_tasks,
    student_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # n=10, x=5, z=1.959964: centre (0.5 + 0.19207)/1.38415 = 0.5, spread 1.959964*sqrt(0.025 + 0.0096036)/1.38415
        (5, 10, 0.2366, 0.7634),
        # x=0: high = (z²/n)/(1 + z²/n) = 0.384146/1.384146
        (0, 10, 0.0, 0.27753),
        (10, 10, 0.72247, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_by_hand_and_by_newcombes_table(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_the_ends_are_where_the_score_test_just_rejects(case: tuple[int, int], confidence: float) -> None:
    successes, n = case
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = wilson_interval(successes, n, confidence=confidence)
    assert 0 <= low <= successes / n <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(successes / n - end) / math.sqrt(end * (1 - end) / n) == pytest.approx(z, rel=1e-6)


def test_without_observations_the_wilson_interval_is_0_to_1() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n", "confidence"), [(2, 1, 0.95), (-1, 3, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_impossible_counts_are_refused(successes: int, n: int, confidence: float) -> None:
    with pytest.raises(ValueError):
        wilson_interval(successes, n, confidence=confidence)


def test_one_sample_per_task_gives_a_proportion_of_independent_episodes() -> None:
    rate = rate_over_tasks([[True], [False], [True], []])
    assert (rate.successes, rate.n, rate.value) == (2, 3, 2 / 3)
    assert rate.interval.method is IntervalMethod.WILSON
    assert (rate.interval.low, rate.interval.high) == wilson_interval(2, 3)


def test_samples_of_one_task_stay_together_when_tasks_are_resampled() -> None:
    # Two tasks of different size, drawn twice: 0/2, 3/4 or 3/3, with chances 1/4, 1/2, 1/4.
    rate = rate_over_tasks([[True] * 3, [False]])
    assert (rate.value, rate.interval.low, rate.interval.high) == (0.75, 0.0, 1.0)
    assert rate.interval.method is IntervalMethod.BOOTSTRAP


def test_the_bootstrap_is_as_wide_as_normal_theory_says_for_many_tasks() -> None:
    # 200 tasks with rates 0 and 1, four samples each: the standard error is that of 200 observations, not of 800.
    interval = interval_over_tasks([4.0 * (task < 80) for task in range(200)], [4] * 200)
    error = math.sqrt(0.4 * 0.6 / 200)
    assert interval.low == pytest.approx(0.4 - 1.96 * error, abs=0.015)
    assert interval.high == pytest.approx(0.4 + 1.96 * error, abs=0.015)


@pytest.mark.parametrize("share", [0, 1, 2])
def test_tasks_with_equal_rates_get_the_wilson_interval_of_that_many_observations(share: int) -> None:
    interval = interval_over_tasks([float(share)] * 5, [2] * 5)
    assert interval.method is IntervalMethod.WILSON_OVER_TASKS
    assert (interval.low, interval.high) == wilson_interval(share * 2.5, 5)


def test_a_rate_without_samples_is_unknown() -> None:
    rate = rate_over_tasks([[], []])
    assert math.isnan(rate.value)
    assert (rate.interval.low, rate.interval.high, rate.interval.method) == (0.0, 1.0, IntervalMethod.NONE)


@pytest.mark.parametrize(("sums", "counts"), [([1.0], [0]), ([3.0], [2]), ([-1.0], [2])])
def test_a_sum_that_the_samples_cannot_reach_is_refused(sums: list[float], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="each worth 0 to 1"):
        interval_over_tasks(sums, counts)


def test_percentiles_are_interpolated_linearly_between_two_values() -> None:
    assert percentiles([3.0, 0.0, 1.0, 2.0], 0.5) == (0.75, 2.25)
    with pytest.raises(ValueError, match="confidence is 1"):
        percentiles([1.0], 1)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_students_quantiles_are_those_of_the_printed_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(0.95, degrees) == pytest.approx(quantile, abs=5e-5)


def test_with_many_degrees_of_freedom_students_quantile_is_the_normal_one() -> None:
    assert student_quantile(0.9, 2_000) == pytest.approx(NormalDist().inv_cdf(0.95), abs=2e-3)


@pytest.mark.parametrize(("confidence", "degrees"), [(0.95, 0), (0.0, 3), (1.0, 3)])
def test_students_quantile_refuses_zero_degrees_of_freedom_and_an_invalid_confidence(
    confidence: float, degrees: int
) -> None:
    with pytest.raises(ValueError, match=r"degrees|confidence"):
        student_quantile(confidence, degrees)
