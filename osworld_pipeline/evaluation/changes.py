"""Changes by a training: each checkpoint against its nearest ancestor and its SFT checkpoint, over all runs with other
seeds, and the changed families of tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint, Stage
from osworld_pipeline.evaluation.arms import arms_of
from osworld_pipeline.evaluation.breakdown import compare_tasks, family_of
from osworld_pipeline.evaluation.effect import Effect, SeedSpread, judge_effect
from osworld_pipeline.evaluation.scores import UNKNOWN_STAGE, EvalRow, rates_by_seed, successes_by_task

NUM_RESAMPLES = 10_000
Pair = tuple[str, str]
"""Ids of the first and the last checkpoint of a training."""


@dataclass(frozen=True, kw_only=True)
class FamilyChange:
    """A family of tasks before and after, over the compared tasks: valid samples and the successes among them."""

    family: str
    num_tasks: int
    before_successes: int
    before_n: int
    after_successes: int
    after_n: int
    difference: float
    """Difference of the success rates, with equal weight of all tasks."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change from the start of a training to its end."""

    runs: tuple[tuple[Pair, ...], ...]
    """Start and end of each; runs differ only in seeds, and a run with branches has several ends."""
    stages: Pair
    """Stages of start and end."""
    effect: Effect | None
    """None if the two must not be compared, or have no task in common."""
    num_seeds: int
    """Evaluation seeds with episodes."""
    families: tuple[FamilyChange, ...] = ()
    """Largest change first."""
    apart: str = ""
    """Why they must not be compared; else empty."""

    def fields(self) -> dict[str, Any]:
        """Its fields for JSON."""
        found = {name: getattr(self, name) for name in ("stages", "starts", "ends", "num_seeds", "families", "apart")}
        if self.effect is not None:
            found |= {**asdict(self.effect.comparison), "verdict": self.effect.words}
        return found

    @property
    def starts(self) -> tuple[str, ...]:
        """The starts without repetition."""
        return tuple(dict.fromkeys(start for run in self.runs for start, _ in run))

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(end for run in self.runs for _, end in run)


class Training:
    """Checkpoints of a state with their parents and arms."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._known = {one.checkpoint_id: one for one in checkpoints}
        self._arms = arms_of(checkpoints)

    def compared_with(self, checkpoint_id: str, shown: Sequence[str]) -> list[str]:
        """The SFT checkpoint that it descends from, and its nearest ancestor, among `shown`."""
        ancestors = [name for name in self._path(checkpoint_id) if name in shown]
        sft = [name for name in ancestors if self._known[name].stage is Stage.SFT]
        return list(dict.fromkeys((*sft[:1], *ancestors[:1])))

    def runs_of(self, before: str, after: str, shown: Sequence[str]) -> list[list[Pair]]:
        """Pairs of `shown` with the same arms as these two, grouped by run, the run of these two first. Pairs whose
        ends share the stage after their start are branches of one run. If `after` does not descend from `before`, this
        pair is the only run."""
        branches: dict[str, list[Pair]] = {}
        for end in dict.fromkeys((after, *shown)):
            path = self._path(end)
            start = next((name for name in path if self._arms[name] == self._arms.get(before)), None)
            if start in (before, *shown) and self._arms[end] == self._arms.get(after):
                first = (end, *path)[path.index(start)]
                branches.setdefault(Ancestor.parse(first).stage_key, []).append((start, end))
        runs = list(branches.values())
        return runs if runs and (before, after) in runs[0] else [[(before, after)]]

    def arms(self, pair: Pair) -> tuple[str, str]:
        return self._arms[pair[0]], self._arms[pair[1]]

    def stage_of(self, checkpoint_id: str) -> str:
        one = self._known.get(checkpoint_id)
        return str(one.stage) if one else UNKNOWN_STAGE

    def _path(self, checkpoint_id: str) -> list[str]:
        """Its known ancestors, the nearest first."""
        path: list[str] = []
        one = self._known.get(checkpoint_id)
        while one is not None and one.parent_id in self._known and one.parent_id not in (checkpoint_id, *path):
            path.append(one.parent_id)
            one = self._known[one.parent_id]
        return path


def changes_of(
    rows: Sequence[EvalRow], shown: Sequence[str], training: Training, *, confidence: float = 0.95
) -> list[Change]:
    """Changes of each of `shown` against its ancestors; pairs that differ only in seeds are one change. `rows`: one
    evaluation of each."""
    pairs = {
        training.arms((before, after)): (before, after)
        for after in reversed(shown)
        for before in reversed(training.compared_with(after, shown))
    }
    return [change_between(rows, pair, shown, training, confidence=confidence) for pair in reversed(pairs.values())]


def changes_of_stage(
    evals: Sequence[EvalRow], num_updates_of: Mapping[str, int], training: Training, *, confidence: float = 0.95
) -> list[tuple[str, Change]]:
    """The changes of the stage's last evaluated checkpoint under each evaluation key. `evals`: all rows;
    `num_updates_of`: the stage's checkpoints. Pairs that must not be compared, or have no task in common,
    are left out."""
    found = []
    for key in dict.fromkeys(row.evaluation_key for row in evals if row.checkpoint_id in num_updates_of):
        rows = [row for row in evals if row.evaluation_key == key]
        shown = sorted({row.checkpoint_id for row in rows})
        end = max(num_updates_of.keys() & set(shown), key=lambda name: (num_updates_of[name], name))
        for start in training.compared_with(end, shown):
            change = change_between(rows, (start, end), shown, training, confidence=confidence)
            found += [(key, change)] if change.effect else []
    return found


def change_between(
    rows: Sequence[EvalRow],
    pair: Pair,
    shown: Sequence[str],
    training: Training,
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
) -> Change:
    """The change of this pair and of the pairs of `shown` that differ from it only in seeds. `rows`: one evaluation of
    each."""
    evals: dict[str, list[EvalRow]] = {}
    for row in rows:
        evals.setdefault(row.checkpoint_id, []).append(row)
    runs = training.runs_of(*pair, [name for name in shown if name in evals])
    sides = [tuple([row for one in run for row in evals.get(one[side], [])] for side in (0, 1)) for run in runs]
    before, after = ([row for side in sides for row in side[place]] for place in (0, 1))
    change = Change(
        runs=tuple(map(tuple, runs)),
        stages=(training.stage_of(pair[0]), training.stage_of(pair[1])),
        effect=None,
        num_seeds=len({row.seed for row in (*before, *after)}),
    )
    try:
        comparison = compare_tasks(before, after, confidence=confidence, num_resamples=num_resamples).comparison
    except ValueError as error:
        return replace(change, apart=str(error))
    if comparison is None:
        return change
    differences = [difference for side in sides if (difference := _mean_difference(*side)) is not None]
    spreads = [SeedSpread.of(rates_by_seed(evals[start]), confidence=confidence) for start in change.starts]
    effect = judge_effect(comparison, spread=SeedSpread.widest(spreads), run_differences=differences)
    return replace(change, effect=effect, families=family_changes(before, after))


def family_changes(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> tuple[FamilyChange, ...]:
    """Changes by family, over the tasks that have a valid sample in both."""
    left, right = successes_by_task(before), successes_by_task(after)
    families: dict[str, list[str]] = {}
    for task_id, family in {row.task: family_of(row) for row in (*before, *after)}.items():
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
            difference=fmean(fmean(right[task]) - fmean(left[task]) for task in tasks),
        )
        for family, tasks in families.items()
    ]
    return tuple(sorted(found, key=lambda one: (-abs(one.difference), one.family)))


def _mean_difference(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> float | None:
    """Mean difference over the tasks that have a valid sample in both, with equal weights; None without one."""
    left, right = successes_by_task(before), successes_by_task(after)
    differences = [fmean(right[task]) - fmean(left[task]) for task in left.keys() & right.keys()]
    return fmean(differences) if differences else None
