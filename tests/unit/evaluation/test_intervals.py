"""Intervals: against numbers by hand, and against the score test itself."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.intervals import wilson_interval


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


def test_without_observations_nothing_is_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n", "confidence"), [(2, 1, 0.95), (-1, 3, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_impossible_counts_are_refused(successes: int, n: int, confidence: float) -> None:
    with pytest.raises(ValueError):
        wilson_interval(successes, n, confidence=confidence)
