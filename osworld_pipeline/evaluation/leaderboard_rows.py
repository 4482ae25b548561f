"""A leaderboard as rows of plain JSON, in which unknown values are null."""

import math
from dataclasses import asdict
from typing import Any

from osworld_pipeline.evaluation.estimators import Estimate
from osworld_pipeline.evaluation.intervals import Rate
from osworld_pipeline.evaluation.leaderboard import Leaderboard, LeaderboardRow, Versus


def leaderboard_rows(board: Leaderboard) -> list[dict[str, Any]]:
    """One flat row for each checkpoint and evaluation key, in the order of the tables; null means unknown."""
    return [
        {
            "evaluation_key": table.evaluation_key,
            "desktops": table.desktops,
            "suites": list(table.suites),
            "seeds": list(table.seeds),
            "max_turns": list(table.max_turns),
            "confidence": board.confidence,
            **_plain_row(row),
        }
        for table in board.tables
        for row in table.rows
    ]


def _plain_row(row: LeaderboardRow) -> dict[str, Any]:
    score = row.score
    per_success, per_episode = row.cost.per_success(), row.cost.per_episode()
    return {
        "rank": row.rank,
        "checkpoint_id": score.checkpoint_id,
        "parent_id": row.parent_id,
        "stage": score.stage,
        "stage_key": score.stage_key,
        "source_dataset": row.source_dataset,
        "num_tasks": score.num_tasks,
        "num_planned": score.num_planned,
        "num_missing": score.num_missing,
        "num_faults": score.num_faults,
        "outcomes": dict(score.outcomes),
        **_plain_rate("lenient", score.lenient),
        **_plain_rate("strict", score.strict),
        "mean_reward": _number(score.mean_reward),
        "mean_turns": _number(score.mean_turns),
        "pass_at_1": _plain_estimate(row.pass_at_1),
        "pass_at_k": _plain_estimate(row.pass_at_k),
        "pass_hat_k": _plain_estimate(row.pass_hat_k),
        "cost_per_success": None if per_success is None else asdict(per_success),
        "cost_per_episode": None if per_episode is None else asdict(per_episode),
        "versus_parent": _plain_versus(row.versus_parent),
        "versus_best": _plain_versus(row.versus_best),
    }


def _plain_rate(name: str, rate: Rate) -> dict[str, Any]:
    return {
        f"{name}_success": _number(rate.value),
        f"{name}_successes": rate.successes,
        f"{name}_n": rate.n,
        f"{name}_low": rate.interval.low,
        f"{name}_high": rate.interval.high,
        f"{name}_interval": str(rate.interval.method),
    }


def _plain_estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "k": estimate.k,
        "value": _number(estimate.value),
        "low": estimate.interval.low,
        "high": estimate.interval.high,
        "interval": str(estimate.interval.method),
        "num_tasks": estimate.num_tasks,
        "num_short": estimate.num_short,
    }


def _plain_versus(versus: Versus | None) -> dict[str, Any] | None:
    if versus is None or versus.changes.comparison is None:
        return None
    changes, comparison = versus.changes, versus.changes.comparison
    return {
        "checkpoint_id": versus.checkpoint_id,
        "difference": comparison.difference,
        "low": comparison.low,
        "high": comparison.high,
        "p_value": comparison.p_value,
        "num_tasks": comparison.num_tasks,
        "is_better": comparison.is_better,
        "is_worse": comparison.is_worse,
        "gains": [asdict(change) for change in changes.gains],
        "regressions": [asdict(change) for change in changes.regressions],
        "num_same": changes.num_same,
        "not_compared": list(changes.not_compared),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
