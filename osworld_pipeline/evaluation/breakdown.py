"""Successes of an evaluation by domain or family of the tasks, and task by task against another evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.evaluation.comparison import Comparison, compare_paired
from osworld_pipeline.evaluation.scores import EvalRow, is_mixed, successes_by_task


def domain_of(row: EvalRow) -> str:
    """The task's domain as in OSWorld's tree; for tasks without a domain, their family."""
    return row.domain or row.family


def family_of(row: EvalRow) -> str:
    return row.family


@dataclass(frozen=True, kw_only=True)
class TaskChange:
    """One task before and after: valid samples and the successes among them."""

    task_id: str
    before_successes: int
    before_n: int
    after_successes: int
    after_n: int

    @property
    def difference(self) -> float:
        """Difference of the two rates, above 0 for a gain."""
        return self.after_successes / self.after_n - self.before_successes / self.before_n

    @property
    def became_solved(self) -> bool:
        """No sample succeeded before, and at least half of them after."""
        return self.before_successes == 0 and 2 * self.after_successes >= self.after_n

    @property
    def became_unsolved(self) -> bool:
        """At least half of the samples succeeded before, and none after."""
        return self.after_successes == 0 and 2 * self.before_successes >= self.before_n


@dataclass(frozen=True, kw_only=True)
class TaskChanges:
    gains: tuple[TaskChange, ...]
    """Tasks whose rate rose, largest change first."""
    regressions: tuple[TaskChange, ...]
    """Tasks whose rate fell, largest change first."""
    num_same: int
    not_compared: tuple[str, ...]
    """Tasks without a valid sample on one side or both."""
    comparison: Comparison | None
    """Comparison over the compared tasks; None if there are none."""


def compare_tasks(
    before: Sequence[EvalRow], after: Sequence[EvalRow], *, confidence: float = 0.95, num_resamples: int = 10_000
) -> TaskChanges:
    """Changes from one checkpoint's evaluation to another's, over the tasks that have a valid sample in both.

    Raises:
        ValueError: the two were evaluated under different settings, or on different desktops.
    """
    keys = {row.evaluation_key for row in (*before, *after)}
    if len(keys) > 1:
        raise ValueError(f"evaluations under different settings cannot be compared: {', '.join(sorted(keys))}")
    desktops = {row.desktops for row in (*before, *after) if row.desktops}
    if len(desktops) > 1 or any(map(is_mixed, desktops)):
        raise ValueError(
            f"evaluations on different desktop images or graders cannot be compared: {'; '.join(sorted(desktops))}"
        )
    left, right = successes_by_task(before), successes_by_task(after)
    changes = [
        TaskChange(
            task_id=task_id,
            before_successes=sum(left[task_id]),
            before_n=len(left[task_id]),
            after_successes=sum(right[task_id]),
            after_n=len(right[task_id]),
        )
        for task_id in sorted(left.keys() & right.keys())
    ]
    changes.sort(key=lambda change: -abs(change.difference))
    gains = tuple(change for change in changes if change.difference > 0)
    regressions = tuple(change for change in changes if change.difference < 0)
    seen = {row.task for row in (*before, *after)}
    return TaskChanges(
        gains=gains,
        regressions=regressions,
        num_same=len(changes) - len(gains) - len(regressions),
        not_compared=tuple(sorted(seen - {change.task_id for change in changes})),
        comparison=compare_paired(left, right, confidence=confidence, num_resamples=num_resamples) if changes else None,
    )
