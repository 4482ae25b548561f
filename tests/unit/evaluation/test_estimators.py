"""pass@k and pass^k against values computed by hand and against counting every choice of k samples."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.estimators import estimate_over_tasks, pass_at_k, pass_hat_k
from osworld_pipeline.evaluation.intervals import IntervalMethod, wilson_interval

SAMPLES = st.lists(st.booleans(), min_size=1, max_size=8).flatmap(
    lambda samples: st.tuples(st.just(samples), st.integers(1, len(samples)))
)


@given(SAMPLES)
def test_pass_at_k_and_pass_hat_k_equal_counting_every_choice_of_k_samples(case: tuple[list[bool], int]) -> None:
    samples, k = case
    choices = list(combinations(samples, k))
    n, successes = len(samples), sum(samples)
    assert pass_at_k(n, successes, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))
    assert pass_hat_k(n, successes, k) == pytest.approx(sum(all(choice) for choice in choices) / len(choices))


def test_pass_at_k_and_pass_hat_k_of_two_successes_in_four_samples_by_hand() -> None:
    # Of the 6 pairs, 1 holds no success and 1 holds both.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_hat_k(4, 2, 2) == pytest.approx(1 / 6)
    assert pass_at_k(4, 2, 1) == pass_hat_k(4, 2, 1) == 0.5


@pytest.mark.parametrize(("num_samples", "chance"), [(3, 0.3), (6, 0.5)])
def test_pass_at_k_and_pass_hat_k_are_unbiased_over_all_samples_of_a_coin(num_samples: int, chance: float) -> None:
    for k in range(1, num_samples + 1):
        at, hat = 0.0, 0.0
        for successes in range(num_samples + 1):
            weight = math.comb(num_samples, successes) * chance**successes * (1 - chance) ** (num_samples - successes)
            at += weight * pass_at_k(num_samples, successes, k)
            hat += weight * pass_hat_k(num_samples, successes, k)
        assert at == pytest.approx(1 - (1 - chance) ** k)
        assert hat == pytest.approx(chance**k)


@pytest.mark.parametrize(("n", "successes", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
def test_impossible_counts_are_refused(n: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"to 2"):
        pass_at_k(n, successes, k)
    with pytest.raises(ValueError, match=r"to 2"):
        pass_hat_k(n, successes, k)


def test_tasks_count_equally_for_any_number_of_samples() -> None:
    found = estimate_over_tasks({"a": [True], "b": [False, False, False]}, 1, pass_at_k)
    assert (found.value, found.num_tasks, found.num_short) == (0.5, 2, 0)


def test_a_task_with_fewer_samples_than_k_is_left_out_and_counted() -> None:
    samples = {"a": [True, False], "b": [True], "c": []}
    found = estimate_over_tasks(samples, 2, pass_at_k)
    assert (found.value, found.num_tasks, found.num_short) == (1.0, 1, 2)


def test_without_a_task_of_k_samples_the_estimate_is_unknown() -> None:
    found = estimate_over_tasks({"a": [True]}, 2, pass_at_k)
    assert math.isnan(found.value)
    assert (found.interval.low, found.interval.high, found.interval.method) == (0.0, 1.0, IntervalMethod.NONE)


def test_with_one_sample_per_task_the_interval_is_wilsons() -> None:
    found = estimate_over_tasks({str(task): [task < 5] for task in range(10)}, 1, pass_at_k)
    assert (found.interval.low, found.interval.high) == wilson_interval(5, 10)
    assert found.interval.method is IntervalMethod.WILSON


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval() -> None:
    few = estimate_over_tasks({str(task): [task < 5] * 2 for task in range(10)}, 1, pass_at_k)
    many = estimate_over_tasks({str(task): [task < 5] * 20 for task in range(10)}, 1, pass_at_k)
    assert few.interval == many.interval
    assert few.interval.method is IntervalMethod.BOOTSTRAP


def test_a_k_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        estimate_over_tasks({"a": [True]}, 0, pass_at_k)
