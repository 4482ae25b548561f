"""What changed from one checkpoint of a training to the next: paired differences, and the families that moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.evaluation.breakdown import compare_tasks, family_of
from osworld_pipeline.evaluation.comparison import Comparison
from osworld_pipeline.evaluation.scores import EvalRow, successes_by_task


@dataclass(frozen=True, kw_only=True)
class FamilyChange:
    """A family of tasks on both sides, over the tasks that were compared; valid samples and the successes in them."""

    family: str
    num_tasks: int
    before_successes: int
    before_n: int
    after_successes: int
    after_n: int
    difference: float
    """Of the success rates, every task of the same weight."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """From a checkpoint to one that descends from it."""

    before: Checkpoint
    after: Checkpoint
    comparison: Comparison | None
    """None where the two must not be compared, or have no task in common."""
    num_seeds: int
    """Episodes that the evaluation plans for a task."""
    families: tuple[FamilyChange, ...]
    """Those that changed most first."""
    apart: str = ""
    """Why the two must not be compared; else empty."""


def changes_of(
    rows: Sequence[EvalRow],
    shown: Sequence[Checkpoint],
    parents: Mapping[str, str | None],
    *,
    confidence: float = 0.95,
) -> list[Change]:
    """Of each of `shown` against the checkpoints that `compared_with` names. `rows`: one evaluation of each."""
    by_checkpoint: dict[str, list[EvalRow]] = {one.checkpoint_id: [] for one in shown}
    for row in rows:
        if row.checkpoint_id in by_checkpoint:
            by_checkpoint[row.checkpoint_id].append(row)
    return [
        _change(before, after, by_checkpoint, confidence)
        for after in shown
        for before in compared_with(after, shown, parents)
    ]


def compared_with(
    checkpoint: Checkpoint, shown: Sequence[Checkpoint], parents: Mapping[str, str | None]
) -> list[Checkpoint]:
    """Of `shown`, the SFT checkpoint that it descends from, and the nearest ancestor. `parents`: by checkpoint."""
    known = {one.checkpoint_id: one for one in shown}
    ancestors: list[Checkpoint] = []
    seen = {checkpoint.checkpoint_id}
    name = parents.get(checkpoint.checkpoint_id)
    while name is not None and name not in seen:
        seen.add(name)
        ancestors += [known[name]] if name in known else []
        name = parents.get(name)
    sft = [one for one in ancestors if one.stage is Stage.SFT]
    return list({one.checkpoint_id: one for one in (*sft[:1], *ancestors[:1])}.values())


def family_changes(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> tuple[FamilyChange, ...]:
    """Over the tasks that both have a valid sample of."""
    left, right = successes_by_task(before), successes_by_task(after)
    families: dict[str, list[str]] = {}
    for task_id, family in {row.task_id: family_of(row) for row in (*before, *after)}.items():
        if task_id in left and task_id in right:
            families.setdefault(family, []).append(task_id)
    found = [
        FamilyChange(
            family=family,
            num_tasks=len(tasks),
            before_successes=sum(sum(left[task]) for task in tasks),
            before_n=sum(len(left[task]) for task in tasks),
            after_successes=sum(sum(right[task]) for task in tasks),
            after_n=sum(len(right[task]) for task in tasks),
            difference=sum(_rate(right[task]) - _rate(left[task]) for task in tasks) / len(tasks),
        )
        for family, tasks in families.items()
    ]
    return tuple(sorted(found, key=lambda one: (-abs(one.difference), one.family)))


def _change(
    before: Checkpoint, after: Checkpoint, by_checkpoint: Mapping[str, Sequence[EvalRow]], confidence: float
) -> Change:
    left, right = by_checkpoint[before.checkpoint_id], by_checkpoint[after.checkpoint_id]
    comparison, apart = None, ""
    try:
        comparison = compare_tasks(left, right, confidence=confidence).comparison
    except ValueError as error:
        apart = str(error)
    return Change(
        before=before,
        after=after,
        comparison=comparison,
        num_seeds=len({row.seed for row in (*left, *right)}),
        families=family_changes(left, right) if comparison else (),
        apart=apart,
    )


def _rate(samples: Sequence[bool]) -> float:
    return sum(samples) / len(samples)
