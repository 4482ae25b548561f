"""Two checkpoints on the same tasks: gains and losses task by task, with their episodes. Only
evaluations with the same settings are compared (see evaluation/leaderboard.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.evaluation.changes import Change, Training, change_between
from osworld_pipeline.evaluation.scores import EvalRow
from osworld_pipeline.tables.views import DESKTOPS_OF_EVALUATION, LAST_ATTEMPT, SAME_ID, TASK_KEY
from osworld_pipeline.web.evaluation_names import EvaluationName
from osworld_pipeline.web.names import stage_rank
from osworld_pipeline.web.viewer.index import Reader

NUM_RESAMPLES = 2_000
"""Resamples for the interval: enough for two digits, and fast over hundreds of tasks."""

# The last attempt at each task and seed, as in the view `evals`.
_EVALS = f"""
SELECT *, {DESKTOPS_OF_EVALUATION} AS desktops FROM (SELECT * FROM (SELECT
    {TASK_KEY}, episode_id, checkpoint_id, stage, task_id, seed, domain, instruction, suite,
    coalesce(family, nullif(domain, ''), 'unknown') AS family,
    outcome, is_valid, is_success, task_reward, shaped_reward, num_steps, max_turns, stage_key,
    provider, image_digest, grader_version, temperature, error, started_at, attempt,
    CASE WHEN starts_with(stage_key, concat('eval-', checkpoint_id, '-'))
        THEN substr(stage_key, length(checkpoint_id) + 7) ELSE '' END AS settings
FROM facts
WHERE purpose = 'evaluate' AND {{condition}} {SAME_ID}) {LAST_ATTEMPT})
"""  # noqa: S608 - our own words


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation of a checkpoint."""

    checkpoint_id: str
    stage: str
    settings: str
    """The evaluation's key; empty if unknown."""
    name: EvaluationName
    """Its readable name."""
    num_tasks: int
    num_episodes: int
    num_valid: int
    num_successes: int

    @property
    def success_rate(self) -> float | None:
        return self.num_successes / self.num_valid if self.num_valid else None


@dataclass(frozen=True, kw_only=True)
class TaskPair:
    """A task before and after, one episode for each seed."""

    task_key: str
    """The key in the view `evals`."""
    instruction: str
    before: tuple[Mapping[str, Any], ...]
    after: tuple[Mapping[str, Any], ...]
    difference: float | None
    """Difference of the success rates, above 0 for a gain; None if a side has no valid episode."""

    @property
    def kind(self) -> str:
        if self.difference is None:
            return "not compared"
        return "gained" if self.difference > 0 else "lost" if self.difference < 0 else "same"


@dataclass(frozen=True, kw_only=True)
class Compared:
    pairs: tuple[TaskPair, ...]
    """Largest gains first, then largest losses, then the others."""
    alone: Change
    """Change between these two checkpoints alone, that is, of one training run."""
    across: Change | None
    """Change over all training runs that differ from these only in seeds, if there are several."""
    counts: Mapping[str, int]
    """Number of tasks by kind."""


def list_evaluated(reader: Reader, names: Mapping[str, EvaluationName]) -> list[Evaluated]:
    """All evaluations by suite and time, then in the order of the stages. `names`: of evaluations, by key."""
    rows = reader.dicts(
        "SELECT checkpoint_id, any_value(stage) AS stage, settings, "  # noqa: S608 - our own names
        "count(DISTINCT task_key) AS num_tasks, count(*) AS num_episodes, count(*) FILTER (is_valid) AS num_valid, "
        f"count(*) FILTER (is_success) AS num_successes FROM ({_EVALS.format(condition='true')}) "
        "GROUP BY checkpoint_id, settings ORDER BY checkpoint_id"
    )
    found = [
        Evaluated(**{**row, "stage": row["stage"] or "", "name": name})
        for row in rows
        if (name := names.get(row["settings"])) is not None
    ]
    return sorted(found, key=lambda one: (one.name.order, stage_rank(one.stage)))


def compare(reader: Reader, before: str, after: str, settings: str, training: Training) -> Compared:
    """Compare two checkpoints under the same settings."""
    evaluated = _checkpoints_under(reader, settings)
    runs = training.runs_of(before, after, evaluated)
    names = {before, after, *(name for run in runs for pair in run for name in pair)}
    evals = {name: _rows(reader, name, settings) for name in names}
    sides = evals[before], evals[after]
    tasks = sorted({row["task_key"] for rows in sides for row in rows})
    pairs = [_pair(key, *([row for row in rows if row["task_key"] == key] for rows in sides)) for key in tasks]
    rank = {"gained": 0, "lost": 1, "same": 2, "not compared": 3}
    pairs.sort(key=lambda pair: (rank[pair.kind], -abs(pair.difference or 0.0), pair.task_key))
    rows = [_eval_row(row) for found in evals.values() for row in found]
    alone = change_between(rows, (before, after), (before, after), training, num_resamples=NUM_RESAMPLES)
    across = (
        change_between(rows, (before, after), evaluated, training, num_resamples=NUM_RESAMPLES)
        if len(runs) > 1
        else None
    )
    return Compared(
        pairs=tuple(pairs),
        alone=alone,
        across=across,
        counts={kind: sum(pair.kind == kind for pair in pairs) for kind in rank},
    )


def _checkpoints_under(reader: Reader, settings: str) -> list[str]:
    sql = f"SELECT DISTINCT checkpoint_id FROM ({_EVALS.format(condition='true')}) WHERE settings = ? ORDER BY 1"  # noqa: S608
    return [row["checkpoint_id"] for row in reader.dicts(sql, [settings])]


def _rows(reader: Reader, checkpoint_id: str, settings: str) -> list[dict[str, Any]]:
    sql = f"SELECT * FROM ({_EVALS.format(condition='checkpoint_id = ?')}) WHERE settings = ? ORDER BY task_key, seed"  # noqa: S608
    return reader.dicts(sql, [checkpoint_id, settings])


def _pair(task_key: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> TaskPair:
    rates = [
        sum(bool(row["is_success"]) for row in rows if row["is_valid"]) / sum(bool(row["is_valid"]) for row in rows)
        if any(row["is_valid"] for row in rows)
        else None
        for rows in (before, after)
    ]
    return TaskPair(
        task_key=task_key,
        instruction=next((row["instruction"] for row in (*before, *after) if row["instruction"]), ""),
        before=tuple(before),
        after=tuple(after),
        difference=None if rates[0] is None or rates[1] is None else rates[1] - rates[0],
    )


def _eval_row(row: Mapping[str, Any]) -> EvalRow:
    names = (
        "checkpoint_id", "stage", "task_id", "task_key", "seed", "family", "suite", "outcome", "shaped_reward",
        "max_turns", "episode_id", "provider", "image_digest", "grader_version", "temperature", "error", "stage_key",
        "domain", "desktops",
    )  # fmt: skip
    return EvalRow(
        **{name: row[name] for name in names},
        success=row["is_success"] if row["is_valid"] else None,
        reward=row["task_reward"] if row["is_valid"] else None,
        turns=row["num_steps"],
    )
