"""Scores of checkpoints: raw task success with its interval; faults stand outside the denominator, and are shown."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.intervals import wilson_interval
from osworld_pipeline.tables.catalog import fresh_views

UNKNOWN_STAGE = "unknown"


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One row of the `evals` view."""

    checkpoint_id: str
    stage: str | None
    task_id: str
    seed: int
    family: str
    suite: str
    outcome: str
    success: bool | None
    """None where the episode ended in a fault."""
    shaped_reward: float | None
    turns: int
    max_turns: int | None
    episode_id: str
    provider: str
    image_digest: str
    grader_version: str
    temperature: float
    error: str | None = None
    stage_key: str = ""
    """Of the evaluation: checkpoint and settings. Rows of different settings are never scored together."""

    @property
    def is_valid(self) -> bool:
        return Outcome(self.outcome).is_valid


@dataclass(frozen=True, kw_only=True)
class CheckpointScore:
    checkpoint_id: str
    stage: str
    n: int
    """Valid episodes: the denominator."""
    successes: int
    low: float
    high: float
    confidence: float
    faults: Mapping[str, int] = field(default_factory=dict)
    """Episodes outside the denominator, by outcome."""
    mean_shaped_reward: float = math.nan
    mean_turns: float = math.nan

    @property
    def success_rate(self) -> float:
        """NaN without a valid episode: unknown is not zero."""
        return self.successes / self.n if self.n else math.nan

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())


def summarise(rows: Sequence[EvalRow], *, confidence: float = 0.95) -> CheckpointScore:
    """The score of one checkpoint from its rows.

    Raises:
        ValueError: no rows, or rows of several checkpoints.
    """
    names = {row.checkpoint_id for row in rows}
    if len(names) != 1:
        raise ValueError(f"a score needs the rows of one checkpoint, not of {len(names)}")
    valid = [row for row in rows if row.is_valid]
    successes = sum(bool(row.success) for row in valid)
    low, high = wilson_interval(successes, len(valid), confidence=confidence)
    return CheckpointScore(
        checkpoint_id=rows[0].checkpoint_id,
        stage=rows[0].stage or UNKNOWN_STAGE,
        n=len(valid),
        successes=successes,
        low=low,
        high=high,
        confidence=confidence,
        faults=dict(sorted(Counter(row.outcome for row in rows if not row.is_valid).items())),
        mean_shaped_reward=_mean(row.shaped_reward for row in valid if row.shaped_reward is not None),
        mean_turns=_mean(row.turns for row in valid),
    )


def score_checkpoints(rows: Iterable[EvalRow], *, confidence: float = 0.95) -> list[CheckpointScore]:
    """A score for each checkpoint, in the order of the stages."""
    by_checkpoint: dict[str, list[EvalRow]] = {}
    for row in rows:
        by_checkpoint.setdefault(row.checkpoint_id, []).append(row)
    order = {str(stage): index for index, stage in enumerate(Stage)}
    scores = [summarise(group, confidence=confidence) for group in by_checkpoint.values()]
    return sorted(scores, key=lambda score: (order.get(score.stage, len(order)), score.checkpoint_id))


def read_evals(state: StateDir, *, stage_keys: Collection[str] | None = None) -> list[EvalRow]:
    """Rows of `evals` as of now: all, or those of the evaluations named. Raises TableError."""
    keys = [entry.name for entry in fields(EvalRow)]
    with fresh_views(state) as connection:
        found = connection.execute(
            f"SELECT {', '.join(keys)} FROM evals ORDER BY checkpoint_id, task_id, seed"  # noqa: S608 - our own names
        ).fetchall()
    rows = [EvalRow(**dict(zip(keys, row, strict=True))) for row in found]
    return rows if stage_keys is None else [row for row in rows if row.stage_key in stage_keys]


def read_scores(
    state: StateDir, *, confidence: float = 0.95, stage_keys: Collection[str] | None = None
) -> list[CheckpointScore]:
    """The score of every checkpoint that was evaluated (in the evaluations named), base first. Raises TableError."""
    return score_checkpoints(read_evals(state, stage_keys=stage_keys), confidence=confidence)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
