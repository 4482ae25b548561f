"""The paired bootstrap against values computed by hand or, where there are none, against normal theory."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.evaluation.comparison import compare_paired, sign_flip_p_value


def test_means_and_difference_are_those_of_the_tasks_both_played() -> None:
    before = {"a": [0.0, 1.0], "b": [0.0], "only here": [1.0]}
    after = {"a": [1.0, 1.0], "b": [1.0, 0.0], "only there": [0.0]}
    compared = compare_paired(before, after)
    assert (compared.num_tasks, compared.before, compared.after) == (2, 0.25, 0.75)
    assert compared.difference == 0.5


def test_equal_gains_on_two_tasks_give_an_interval_without_width_and_are_not_significant() -> None:
    compared = compare_paired({"a": [0.0], "b": [0.5]}, {"a": [0.25], "b": [0.75]})
    assert (compared.low, compared.high) == (0.25, 0.25)
    # Both signs agree by chance half of the time.
    assert compared.p_value == 0.5
    assert not compared.is_better


@pytest.mark.parametrize(("num_tasks", "is_proof"), [(5, False), (6, True)])
def test_six_gains_without_a_loss_are_the_fewest_that_are_significant(num_tasks: int, is_proof: bool) -> None:
    none = {str(task): [0.0] for task in range(num_tasks)}
    all_of_them = {str(task): [1.0] for task in range(num_tasks)}
    gain, loss = compare_paired(none, all_of_them), compare_paired(all_of_them, none)
    assert gain.p_value == 2 / 2**num_tasks
    assert (gain.is_better, gain.is_worse) == (is_proof, False)
    assert (loss.is_better, loss.is_worse) == (False, is_proof)


@given(st.lists(st.sampled_from([-1.0, -0.75, -0.5, -1 / 3, 0.0, 0.25, 1 / 3, 0.5, 1.0]), max_size=8))
def test_the_p_value_equals_that_of_enumerating_all_signs(differences: list[float]) -> None:
    signed = product((1, -1), repeat=len(differences))
    sums = [abs(sum(map(math.prod, zip(differences, signs, strict=True)))) for signs in signed]
    share = sum(total >= abs(sum(differences)) - 1e-7 for total in sums) / len(sums)
    assert sign_flip_p_value(differences) == pytest.approx(share)


def test_with_one_sample_per_task_the_p_value_is_mcnemars() -> None:
    # 9 won and 2 lost: twice the chance of at most 2 heads in 11 throws, 2 * (1 + 11 + 55) / 2048.
    assert sign_flip_p_value([1.0] * 9 + [-1.0] * 2 + [0.0] * 30) == pytest.approx(134 / 2048)


def test_with_too_many_sums_the_p_value_is_estimated_by_draws_and_still_correct() -> None:
    # Like 80 normal draws: two standard deviations from 0, so a p-value near 0.046.
    sizes = [1 + math.sin(index) / 3 for index in range(80)]
    spread = math.sqrt(sum(size * size for size in sizes))
    shift = sum(sizes) - 2 * spread
    flipped: list[float] = []
    for size in sizes:
        flipped.append(-size if shift > 2 * size else size)
        shift -= 2 * size if shift > 2 * size else 0
    expected = math.erfc(abs(sum(flipped)) / spread / math.sqrt(2))
    assert sign_flip_p_value(flipped) == pytest.approx(expected, abs=0.01)


def test_two_opposite_tasks_give_an_interval_over_the_whole_range() -> None:
    # Drawn twice from +1 and -1: the mean is -1, 0 or 1 with chances 1/4, 1/2, 1/4.
    compared = compare_paired({"a": [0.0], "b": [1.0]}, {"a": [1.0], "b": [0.0]})
    assert (compared.difference, compared.low, compared.high) == (0.0, -1.0, 1.0)
    assert not compared.is_better


def test_the_interval_is_as_wide_as_normal_theory_says_for_many_tasks() -> None:
    # 200 tasks, of which 80 gain 1: mean 0.4, standard error sqrt(0.4 * 0.6 / 200) = 0.0346.
    before = {str(task): [0.0] for task in range(200)}
    after = {str(task): [float(task < 80)] for task in range(200)}
    compared = compare_paired(before, after, confidence=0.95)
    error = math.sqrt(0.4 * 0.6 / 200)
    assert compared.low == pytest.approx(0.4 - 1.96 * error, abs=0.01)
    assert compared.high == pytest.approx(0.4 + 1.96 * error, abs=0.01)


def test_more_samples_of_one_task_do_not_count_as_more_tasks() -> None:
    few = compare_paired({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [0.0]})
    many = compare_paired({"a": [0.0] * 50, "b": [0.0]}, {"a": [1.0] * 50, "b": [0.0]})
    assert (few.low, few.high, few.num_tasks) == (many.low, many.high, many.num_tasks)


def test_the_same_seed_gives_the_same_interval() -> None:
    before, after = {str(k): [0.0] for k in range(9)}, {str(k): [float(k % 2)] for k in range(9)}
    assert compare_paired(before, after, seed=3) == compare_paired(before, after, seed=3)


@pytest.mark.parametrize(("before", "after"), [({}, {}), ({"a": [1.0]}, {"b": [1.0]}), ({"a": []}, {"a": [1.0]})])
def test_a_comparison_without_common_tasks_or_samples_is_refused(
    before: dict[str, list[float]], after: dict[str, list[float]]
) -> None:
    with pytest.raises(ValueError, match=r"no task in common|has no sample"):
        compare_paired(before, after)
