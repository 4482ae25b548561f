"""The record of one stage of training in the store: its episodes, groups and injections by update, and its data
sources."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from osworld_pipeline.columns.metric_names import present_name
from osworld_pipeline.domain.checkpoint import Ancestor, Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.scores import EvalRow
from osworld_pipeline.tables.catalog import fresh_views

_EPISODES = """
SELECT e.episode_id, e."update", e.task_id, e.group_id, e.outcome, e.is_valid, e.is_success, e.attempt,
       e.task_reward, e.partial_reward, e.penalty, e.shaped_reward, e.num_steps, e.error, e.started_at,
       coalesce(e.times_s, MAP([]::VARCHAR[], []::DOUBLE[])) AS times_s,
       coalesce(e.reward_parts, MAP([]::VARCHAR[], []::DOUBLE[])) AS reward_parts,
       s.response_tokens, s.unparsed
FROM episodes e
LEFT JOIN (
    SELECT episode_id, sum(response_num_tokens)::BIGINT AS response_tokens,
           count(*) FILTER (NOT action_parsed) AS unparsed
    FROM steps WHERE purpose = 'train' GROUP BY episode_id
) s ON s.episode_id = e.episode_id
WHERE e.purpose = 'train' AND e.stage_key = ? AND e."update" >= 1
ORDER BY e."update", e.episode_id
"""
_GROUPS = """
SELECT "update", group_id, task_id, coalesce(fate, 'trained') AS status, coalesce(reason, '') AS reason,
       "update" - 1 - oldest_policy_version AS staleness
FROM rollout_groups WHERE stage_key = ? ORDER BY "update", group_id
"""
_INJECTIONS = """
SELECT "update", group_id, row_id, task_id, source_dataset, coalesce(kind, '') AS kind, reward,
       advantage, weight
FROM injections WHERE stage_key = ? ORDER BY "update", group_id
"""
_SOURCES = """
SELECT how, kind, coalesce(source_dataset, '') AS source_dataset, count(*) AS num_rows,
       count(DISTINCT task_id) AS num_tasks
FROM made_from WHERE checkpoint_id = ? AND kind <> 'group' GROUP BY ALL ORDER BY how, num_rows DESC
"""


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """A figure of the trainer, as MLflow has it."""

    stage: str
    update: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class TrainingEpisode:
    episode_id: str
    update: int
    task_id: str
    group_id: str | None
    outcome: str
    is_valid: bool
    is_success: bool
    attempt: int
    task_reward: float | None
    partial_reward: float | None
    penalty: float | None
    shaped_reward: float | None
    num_steps: int
    error: str | None
    started_at: float
    times_s: Mapping[str, float]
    reward_parts: Mapping[str, float]
    response_tokens: int | None
    """Sampled tokens over all turns; None without a turn."""
    unparsed: int | None
    """Turns whose response had no action."""


@dataclass(frozen=True, kw_only=True)
class TrainingGroup:
    update: int
    group_id: str
    task_id: str
    status: str
    reason: str
    staleness: int | None
    """Updates between the oldest weights that sampled it and the weights that it trained; None without samples."""


@dataclass(frozen=True, kw_only=True)
class TrainingInjection:
    update: int
    group_id: str
    row_id: str
    task_id: str
    source_dataset: str
    kind: str
    reward: float
    advantage: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Rows of one kind and source that the stage was trained on."""

    how: str
    kind: str
    source_dataset: str
    num_rows: int
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    stage_key: str
    stage: str
    checkpoint: Checkpoint | None
    """The newest of the stage: the final one, or a milestone of a running stage; None before the first."""
    ancestors: tuple[str, ...]
    """Its ancestors, the nearest first."""
    episodes: tuple[TrainingEpisode, ...] = ()
    groups: tuple[TrainingGroup, ...] = ()
    injections: tuple[TrainingInjection, ...] = ()
    sources: tuple[DataSource, ...] = ()
    metrics: tuple[MetricPoint, ...] = ()
    evals: tuple[EvalRow, ...] = ()
    """Evaluations of its checkpoints."""
    start_evals: tuple[EvalRow, ...] = ()
    """Evaluations of the checkpoint that it started from."""
    num_updates_of: Mapping[str, int] = field(default_factory=dict)
    """Number of updates by checkpoint of the stage."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the run; empty if unknown."""
        return self.checkpoint.recipe if self.checkpoint else {}

    @property
    def num_planned(self) -> int | None:
        """Updates of the whole stage by the recipe; None if it does not say."""
        phase = self.stage.removeprefix("gspo_")
        section: Any = self.recipe.get("gspo", {}).get(phase) if phase != self.stage else self.recipe.get(self.stage)
        return section.get("num_updates") if isinstance(section, Mapping) else None

    @property
    def is_whole(self) -> bool:
        """Whether the stage has ended: its final checkpoint exists, not only milestones."""
        return self.checkpoint is not None and self.checkpoint.checkpoint_id == self.stage_key


def read_training(
    state: StateDir,
    stage_key: str,
    *,
    checkpoints: Sequence[Checkpoint],
    metrics: Sequence[MetricPoint] = (),
    evals: Sequence[EvalRow] = (),
) -> TrainingRecord:
    """`checkpoints`: all of the state; `metrics`: those of this stage in MLflow; if there are none, those in
    its checkpoints' cards are used; `evals`: all of the state, of which those of this stage are kept. Raises
    TableError."""
    mine = [one for one in checkpoints if Ancestor.parse(one.checkpoint_id).stage_key == stage_key]
    newest = max(mine, key=lambda one: (one.checkpoint_id == stage_key, one.num_updates), default=None)
    num_updates_of = {one.checkpoint_id: one.num_updates for one in mine}
    with fresh_views(state, "episodes", "steps", "rollout_groups", "injections", "made_from") as connection:

        def rows(kind: type, sql: str, key: str) -> tuple[Any, ...]:
            cursor = connection.execute(sql, [key])
            names = [column[0] for column in cursor.description or ()]
            assert names == [entry.name for entry in fields(kind)], f"{kind.__name__} has other columns: {names}"
            return tuple(kind(**dict(zip(names, row, strict=True))) for row in cursor.fetchall())

        episodes = rows(TrainingEpisode, _EPISODES, stage_key)
        groups = rows(TrainingGroup, _GROUPS, stage_key)
        injections = rows(TrainingInjection, _INJECTIONS, stage_key)
        sources = rows(DataSource, _SOURCES, newest.checkpoint_id) if newest else ()
    return TrainingRecord(
        stage_key=stage_key,
        stage=str(newest.stage) if newest else stage_of(stage_key),
        checkpoint=newest,
        ancestors=_ancestors(newest, checkpoints),
        episodes=episodes,
        groups=groups,
        injections=injections,
        sources=sources,
        metrics=tuple(metrics) or tuple(_carried(mine)),
        evals=tuple(row for row in evals if row.checkpoint_id in num_updates_of),
        start_evals=tuple(row for row in evals if newest and row.checkpoint_id == newest.parent_id),
        num_updates_of=num_updates_of,
    )


def stages_at_work(state: StateDir) -> list[str]:
    """Keys of the stages that have rolled out episodes, also unfinished ones. Raises TableError."""
    sql = "SELECT DISTINCT stage_key FROM episodes WHERE purpose = 'train' AND \"update\" >= 1 ORDER BY 1"
    with fresh_views(state, "episodes") as connection:
        return [row[0] for row in connection.execute(sql).fetchall() if row[0]]


def stage_of(stage_key: str) -> str:
    return re.sub(r"-[0-9a-f]+$", "", stage_key)


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Indented JSON, for people."""
    return json.dumps(recipe, indent=2, ensure_ascii=False, default=str)


def _ancestors(checkpoint: Checkpoint | None, checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    parents = {one.checkpoint_id: one.parent_id for one in checkpoints}
    found: list[str] = []
    name = checkpoint.parent_id if checkpoint else None
    while name is not None and name not in found:
        found.append(name)
        name = parents.get(name)
    return tuple(found)


def _carried(checkpoints: Sequence[Checkpoint]) -> list[MetricPoint]:
    return [
        MetricPoint(stage=str(one.stage), update=one.num_updates, name=present_name(name), value=value)
        for one in sorted(checkpoints, key=lambda one: one.num_updates)
        for name, value in one.metrics.items()
    ]
