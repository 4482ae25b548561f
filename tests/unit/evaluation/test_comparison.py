"""The paired bootstrap: by hand where it can be, against the normal theory where it cannot."""

import math

import pytest

from osworld_pipeline.evaluation.comparison import compare_paired


def test_means_and_difference_are_those_of_the_tasks_both_played() -> None:
    before = {"a": [0.0, 1.0], "b": [0.0], "only here": [1.0]}
    after = {"a": [1.0, 1.0], "b": [1.0, 0.0], "only there": [0.0]}
    compared = compare_paired(before, after)
    assert (compared.num_tasks, compared.before, compared.after) == (2, 0.25, 0.75)
    assert compared.difference == 0.5


def test_equal_gains_on_every_task_leave_no_doubt() -> None:
    compared = compare_paired({"a": [0.0], "b": [0.5]}, {"a": [0.25], "b": [0.75]})
    assert (compared.low, compared.high) == (0.25, 0.25)
    assert compared.is_better


def test_two_opposite_tasks_give_the_whole_range() -> None:
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
def test_nothing_to_compare_is_refused(before: dict[str, list[float]], after: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match=r"no task in common|without a sample"):
        compare_paired(before, after)
