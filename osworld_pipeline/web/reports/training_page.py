"""The page of one training run: a stage update by update, and its data sources."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.group import GroupStatus
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.changes import Change
from osworld_pipeline.evaluation.effect import RULE
from osworld_pipeline.evaluation.training_record import (
    TrainingEpisode,
    TrainingGroup,
    TrainingRecord,
    recipe_text,
)
from osworld_pipeline.web.charts.training import training_sections
from osworld_pipeline.web.evaluation_names import name_of, read_evaluation_names
from osworld_pipeline.web.formats import counted, when
from osworld_pipeline.web.pages import write_page
from osworld_pipeline.web.reports.filmstrips import FilmstripOf, read_filmstrips
from osworld_pipeline.web.reports.report import faults_by_kind

MAX_TASKS = 40


@dataclass(frozen=True, kw_only=True)
class TaskHalves:
    """Success of a task in the first half of the updates, and in the second."""

    task_id: str
    first_successes: int
    first_n: int
    second_successes: int
    second_n: int
    num_faults: int
    num_injections: int

    @property
    def change(self) -> float:
        """Difference of the two rates; NaN if a half has no valid episode."""
        if not (self.first_n and self.second_n):
            return math.nan
        return self.second_successes / self.second_n - self.first_successes / self.first_n


def training_file(stage_key: str) -> str:
    return f"training-{stage_key}.html"


def write_training_page(
    state: StateDir,
    record: TrainingRecord,
    *,
    changes: Sequence[tuple[str, Change]] = (),
    confidence: float = 0.95,
) -> Path:
    """Write `reports/training-<stage key>.html`. `changes`: with the keys of their evaluations.
    Raises TableError, StoreError."""
    tasks = task_halves(record)
    names = read_evaluation_names(state) if record.evals else {}
    return write_page(
        state.reports / training_file(record.stage_key),
        "reports/training.html.jinja",
        record=record,
        summary=_summary(record),
        facts=_facts(record),
        changes=[
            (name_of(key, names), [change for _, change in found])
            for key, found in groupby(changes, key=lambda one: one[0])
        ],
        rule=RULE,
        sections=training_sections(record, confidence=confidence, names=names),
        tasks=tasks[:MAX_TASKS],
        num_more_tasks=max(0, len(tasks) - MAX_TASKS),
        dropped=_dropped(record.groups),
        faults=faults_by_kind(record.episodes),
        filmstrips=read_filmstrips(state, _shown(record)),
        recipe=recipe_text(record.recipe) if record.recipe else "",
    )


def task_halves(record: TrainingRecord) -> list[TaskHalves]:
    """Tasks with the largest changes first; tasks with episodes in only one half come last."""
    if not record.episodes:
        return []
    updates = [episode.update for episode in record.episodes]
    middle = (min(updates) + max(updates)) / 2
    injected = Counter(one.task_id for one in record.injections)
    by_task: dict[str, list[TrainingEpisode]] = {}
    for episode in record.episodes:
        by_task.setdefault(episode.task_id, []).append(episode)
    halves = [_halves(task_id, found, middle, injected[task_id]) for task_id, found in by_task.items()]
    return sorted(halves, key=lambda one: (math.isnan(one.change), -abs(one.change), one.task_id))


def _halves(task_id: str, episodes: Sequence[TrainingEpisode], middle: float, num_injections: int) -> TaskHalves:
    first = [one.is_success for one in episodes if one.is_valid and one.update <= middle]
    second = [one.is_success for one in episodes if one.is_valid and one.update > middle]
    return TaskHalves(
        task_id=task_id,
        first_successes=sum(first),
        first_n=len(first),
        second_successes=sum(second),
        second_n=len(second),
        num_faults=sum(not one.is_valid for one in episodes),
        num_injections=num_injections,
    )


def _summary(record: TrainingRecord) -> str:
    done = record.checkpoint.num_updates if record.checkpoint else 0
    reached = max([done, *(point.update for point in record.metrics), *(group.update for group in record.groups)])
    planned = f" of {record.num_planned}" if record.num_planned else ""
    if record.is_whole:
        state = f"It has ended, after {counted(done, 'update')}."
    elif record.checkpoint is not None:
        state = f"It has not ended: {reached}{planned} updates were begun; the last milestone has {done}."
    else:
        state = f"It has not ended and has no milestone; it began {counted(reached, 'update')}."
    valid = [one for one in record.episodes if one.is_valid]
    if not record.episodes:
        return state
    tasks = {one.task_id for one in record.episodes}
    return (
        f"{state} {counted(len(record.episodes), 'episode')} of {counted(len(tasks), 'task')}: "
        f"{sum(one.is_success for one in valid):,} of {len(valid):,} valid ones succeeded, and "
        f"{len(record.episodes) - len(valid):,} ended in a fault or a timeout, or had input from a person."
    )


def _facts(record: TrainingRecord) -> dict[str, str]:
    """The known facts."""
    rolled_out, checkpoint = _rolled_out(record.episodes), record.checkpoint
    facts = {"Rolled out": rolled_out}
    if checkpoint is not None:
        dirty = " with changes" if checkpoint.is_code_dirty else ""
        facts = {
            "Recipe": str(checkpoint.recipe.get("name", "")),
            "Recipe digest": checkpoint.recipe_digest,
            "Parents": " ← ".join(record.ancestors) or "none",
            "Data digest": checkpoint.data_digest,
            "Code": f"{checkpoint.code_version}{dirty}" if checkpoint.code_version else "",
            "Weights": checkpoint.weights_digest,
            "Runs": ", ".join(f"{system} {run_id}" for system, run_id in sorted(checkpoint.run_ids.items())),
            "Rolled out": rolled_out,
        }
    return {name: value for name, value in facts.items() if value}


def _rolled_out(episodes: Sequence[TrainingEpisode]) -> str:
    """The times of the start of the first episode and of the end of the last one, UTC."""
    begun = [one.started_at for one in episodes if one.started_at > 0]
    if not begun:
        return ""
    end = max(one.started_at + one.times_s.get("total", 0.0) for one in episodes)
    return f"{when(min(begun), to_seconds=True)} to {when(end, to_seconds=True)} UTC"


def _dropped(groups: Sequence[TrainingGroup]) -> list[tuple[str, int, TrainingGroup]]:
    """(status, number, the first with a reason)."""
    by_status: dict[str, list[TrainingGroup]] = {}
    for group in groups:
        if group.status != GroupStatus.TRAINED:
            by_status.setdefault(group.status, []).append(group)
    return [
        (status, len(found), next((group for group in found if group.reason), found[0]))
        for status, found in sorted(by_status.items())
    ]


def _shown(record: TrainingRecord) -> list[FilmstripOf]:
    """A success and a failure of the last updates that had one; a truncated episode instead of one that is missing."""
    found: Mapping[str, TrainingEpisode] = {
        episode.outcome: episode for episode in sorted(record.episodes, key=lambda one: (one.update, one.num_steps))
    }
    chosen = [found[kind] for kind in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED) if kind in found]
    return [
        FilmstripOf(episode_id=one.episode_id, task_id=one.task_id, stage=record.stage, outcome=one.outcome)
        for one in chosen[:2]
    ]
