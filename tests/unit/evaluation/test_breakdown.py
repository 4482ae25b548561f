"""Scores by domain and family, and what changed task by task."""

import pytest
from eval_samples import eval_rows

from osworld_pipeline.evaluation.breakdown import compare_tasks


def test_gains_and_regressions_are_reported_by_task_with_the_samples_of_both_sides() -> None:
    before = eval_rows({"gone": "ssss", "came": "ff", "rose": "sfff", "same": "sf", "left": "e", "only": "s"})
    after = eval_rows({"gone": "ffe", "came": "sf", "rose": "ssff", "same": "sf", "left": "s"}, checkpoint="d")
    changes = compare_tasks(before, after)
    reported = [(c.task_id, c.before_successes, c.before_n, c.after_successes, c.after_n) for c in changes.gains]
    assert reported == [("came", 0, 2, 1, 2), ("rose", 1, 4, 2, 4)]
    (lost,) = changes.regressions
    assert (lost.task_id, lost.before_successes, lost.before_n, lost.after_successes, lost.after_n) == (
        "gone",
        4,
        4,
        0,
        2,
    )
    assert (changes.num_same, changes.not_compared) == (1, ("left", "only"))
    assert [change.became_solved for change in changes.gains] == [True, False]
    assert lost.became_unsolved
    assert changes.comparison is not None
    assert changes.comparison.num_tasks == 4
    assert changes.comparison.difference == pytest.approx((-1 + 0.5 + 0.25 + 0) / 4)


def test_without_a_task_in_common_there_is_nothing_to_compare() -> None:
    changes = compare_tasks(eval_rows({"a": "s"}), eval_rows({"b": "s"}, checkpoint="d"))
    assert (changes.comparison, changes.not_compared) == (None, ("a", "b"))


def test_evaluations_under_different_settings_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different settings cannot be compared: one, two"):
        compare_tasks(eval_rows({"a": "s"}, key="one"), eval_rows({"a": "s"}, key="two", checkpoint="d"))
