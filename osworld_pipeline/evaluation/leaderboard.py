"""The leaderboard: checkpoints in order of success, one table for each evaluation setting. Evaluations with different
settings, desktop images or versions of the grader are never ranked together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from osworld_pipeline.evaluation.breakdown import TaskChanges, compare_tasks
from osworld_pipeline.evaluation.cost import Cost, total_cost
from osworld_pipeline.evaluation.estimators import Estimate, estimate_over_tasks, pass_at_k, pass_hat_k
from osworld_pipeline.evaluation.scores import CheckpointScore, EvalRow, is_mixed, successes_by_task, summarise

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The comparison with another checkpoint of the same table."""

    checkpoint_id: str
    changes: TaskChanges


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    rank: int | None
    """Rank by lenient success, from 1; equal success shares a rank. None if no episode is valid, if planned episodes
    are missing (they may be the hard ones), or if desktops or graders were mixed."""
    score: CheckpointScore
    parent_id: str | None
    source_dataset: str
    """The import it belongs to; empty for an evaluation of our own."""
    pass_at_1: Estimate
    """Estimate with equal weight of tasks; `score` has equal weight of episodes."""
    pass_at_k: Estimate | None
    """k is the largest number of valid samples of a task; None if that is 1."""
    pass_hat_k: Estimate | None
    """Estimate with the same k."""
    cost: Cost
    versus_parent: Versus | None
    """None if the parent is not in this table, if they have no task in common, or if desktops or graders were mixed."""
    versus_best: Versus | None
    """Comparison with the first of rank 1; None for that one itself, without a rank 1, or without a task in common."""


@dataclass(frozen=True, kw_only=True)
class LeaderboardTable:
    """All evaluations with one key on the same desktops: suite, seeds, budget, limits, prompts, image and grader."""

    evaluation_key: str
    """Empty if unknown; such a table has one checkpoint."""
    desktops: str
    """Image and grader; empty if no episode was graded."""
    suites: tuple[str, ...]
    seeds: tuple[int, ...]
    max_turns: tuple[int, ...]
    rows: tuple[LeaderboardRow, ...]
    """Ranked ones first."""


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    tables: tuple[LeaderboardTable, ...]
    confidence: float


def build_leaderboard(
    rows: Sequence[EvalRow],
    parents: Mapping[str, str | None],
    *,
    planned: Mapping[str, int],
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
) -> Leaderboard:
    """`parents`: the parent of each checkpoint; `planned`: by stage_key, the number of episodes of the evaluation. An
    evaluation with a plan and no row is in no table, because its settings are unknown.

    Raises:
        ValueError: more rows than were planned.
    """
    groups: dict[_TableKey, dict[str, list[EvalRow]]] = {}
    for row in rows:
        key = row.evaluation_key
        # Evaluations with unknown settings are not comparable.
        alone = "" if key else f"{row.checkpoint_id}/{row.stage_key}"
        table = groups.setdefault(_TableKey(key, alone, row.desktops), {})
        table.setdefault(row.checkpoint_id, []).append(row)
    _place_ungraded(groups)
    # The tables of one key in order of their number of checkpoints.
    ordered = sorted(groups, key=lambda group: (group.key, group.alone, -len(groups[group]), group.desktops))
    return Leaderboard(
        tables=tuple(
            _Table(groups[group], parents, planned, confidence, num_resamples).build(group) for group in ordered
        ),
        confidence=confidence,
    )


class _TableKey(NamedTuple):
    key: str
    alone: str
    """Distinguishes tables without a key."""
    desktops: str


def _place_ungraded(groups: dict[_TableKey, dict[str, list[EvalRow]]]) -> None:
    """Move checkpoints without a graded episode, which have no rank, to the largest table of their settings."""
    for group in [group for group in groups if not group.desktops]:
        others = [
            other for other in groups if other[:2] == group[:2] and other.desktops and not is_mixed(other.desktops)
        ]
        if others:
            largest = max(sorted(others), key=lambda other: len(groups[other]))
            groups[largest] |= groups.pop(group)


@dataclass(frozen=True)
class _Table:
    """The rows of one table by checkpoint, and their common inputs."""

    evals: Mapping[str, Sequence[EvalRow]]
    parents: Mapping[str, str | None]
    planned: Mapping[str, int]
    confidence: float
    num_resamples: int

    def build(self, group: _TableKey) -> LeaderboardTable:
        scores = {
            checkpoint_id: summarise(rows, confidence=self.confidence, num_planned=self.planned.get(rows[0].stage_key))
            for checkpoint_id, rows in self.evals.items()
        }
        ranks = rank_scores(scores)
        best = next((checkpoint_id for checkpoint_id, rank in ranks.items() if rank == 1), None)
        every = [row for rows in self.evals.values() for row in rows]
        return LeaderboardTable(
            evaluation_key=group.key,
            desktops=group.desktops,
            suites=tuple(sorted({row.suite for row in every})),
            seeds=tuple(sorted({row.seed for row in every})),
            max_turns=tuple(sorted({row.max_turns for row in every if row.max_turns})),
            rows=tuple(self._row(scores[checkpoint_id], rank, best) for checkpoint_id, rank in ranks.items()),
        )

    def _row(self, score: CheckpointScore, rank: int | None, best: str | None) -> LeaderboardRow:
        rows = self.evals[score.checkpoint_id]
        samples = successes_by_task(rows)
        k = max(map(len, samples.values()), default=1)
        parent_id = self.parents.get(score.checkpoint_id)
        versus_parent = self._versus(parent_id, rows)
        return LeaderboardRow(
            rank=rank,
            score=score,
            parent_id=parent_id,
            source_dataset=rows[0].source_dataset or "",
            pass_at_1=estimate_over_tasks(samples, 1, pass_at_k, confidence=self.confidence),
            pass_at_k=estimate_over_tasks(samples, k, pass_at_k, confidence=self.confidence) if k > 1 else None,
            pass_hat_k=estimate_over_tasks(samples, k, pass_hat_k, confidence=self.confidence) if k > 1 else None,
            cost=total_cost(rows),
            versus_parent=versus_parent,
            versus_best=versus_parent if parent_id == best else self._versus(best, rows),
        )

    def _versus(self, other: str | None, rows: Sequence[EvalRow]) -> Versus | None:
        if other is None or other not in self.evals or other == rows[0].checkpoint_id or is_mixed(rows[0].desktops):
            return None
        changes = compare_tasks(self.evals[other], rows, confidence=self.confidence, num_resamples=self.num_resamples)
        return Versus(checkpoint_id=other, changes=changes) if changes.comparison else None


def rank_scores(scores: Mapping[str, CheckpointScore]) -> dict[str, int | None]:
    """The rank of each checkpoint, in the order of the table: the best first, equal ones by id with the same rank, and
    those without a rank at the end."""
    ranked = [name for name, score in scores.items() if score.n and not score.num_missing and not score.is_mixed]
    ranked.sort(key=lambda name: (-scores[name].success_rate, name))
    ranks: dict[str, int | None] = {}
    for place, name in enumerate(ranked, 1):
        before = ranked[place - 2] if place > 1 else None
        is_equal = before is not None and scores[before].success_rate == scores[name].success_rate
        ranks[name] = ranks[before] if before is not None and is_equal else place
    return ranks | dict.fromkeys(sorted(scores.keys() - ranks.keys()))
