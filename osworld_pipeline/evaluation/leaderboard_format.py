"""A leaderboard as Markdown for people, and as rows of plain JSON in which unknown values are null."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osworld_pipeline.evaluation.cost import CostShare
from osworld_pipeline.evaluation.estimators import Estimate
from osworld_pipeline.evaluation.intervals import Rate
from osworld_pipeline.evaluation.leaderboard import Leaderboard, LeaderboardRow, LeaderboardTable, Versus
from osworld_pipeline.evaluation.scores import is_mixed

UNKNOWN = "–"
_COLUMNS = (
    "rank", "checkpoint", "stage", "success", "interval", "strict", "episodes", "faults", "missing", "against parent",
    "against best", "tokens a success", "desktop s a success",
)  # fmt: skip


_WHY_SPLIT = "Not ranked together with the other tables of this evaluation: other desktop image or grader."
_WHY_MIXED = "Not ranked: its episodes were graded on several desktop images or by several versions of the grader."


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


def leaderboard_markdown(board: Leaderboard) -> str:
    """A table for each evaluation key and its desktops, under a line that describes the evaluation."""
    if not board.tables:
        return "No checkpoint has been evaluated yet.\n"
    num_tables = Counter(table.evaluation_key for table in board.tables)
    return "\n".join(
        _markdown_table(table, board.confidence, is_split=num_tables[table.evaluation_key] > 1)
        for table in board.tables
    )


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


def _markdown_table(table: LeaderboardTable, confidence: float, *, is_split: bool) -> str:
    """`is_split`: other tables have the same settings and other desktops."""
    facts: Mapping[str, Sequence[object]] = {
        "suite": table.suites,
        "seeds": table.seeds,
        "step budget": table.max_turns,
        "desktops": (table.desktops,) if table.desktops else (),
    }
    known = [f"{name} {', '.join(map(str, values))}" for name, values in facts.items() if values]
    title = f"Evaluation `{table.evaluation_key}`" if table.evaluation_key else "Settings unknown"
    lines = [
        f"**{title}**: {'; '.join(known)}; intervals at {confidence:.0%}",
        *(["", _WHY_SPLIT] if is_split and table.evaluation_key else []),
        *(["", _WHY_MIXED] if is_mixed(table.desktops) else []),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(_markdown_row(row) for row in table.rows),
        "",
    ]
    return "\n".join(lines)


def _markdown_row(row: LeaderboardRow) -> str:
    score, price = row.score, row.cost.per_success()
    cells = (
        _or_unknown(row.rank),
        f"`{score.checkpoint_id}`",
        f"{row.source_dataset} (import)" if row.source_dataset else score.stage,
        _percent(score.lenient.value),
        f"{score.low:.1%} to {score.high:.1%}",
        _percent(score.strict.value),
        f"{score.successes}/{score.n}",
        ", ".join(f"{count} {outcome}" for outcome, count in score.faults.items()) or "0",
        _or_unknown(score.num_missing),
        _difference(row.versus_parent),
        _difference(row.versus_best),
        _price(price, "response_tokens"),
        _price(price, "desktop_s"),
    )
    return f"| {' | '.join(cells)} |"


def _difference(versus: Versus | None) -> str:
    comparison = versus.changes.comparison if versus else None
    if comparison is None:
        return UNKNOWN
    return f"{comparison.difference:+.1%} ({comparison.low:+.1%} to {comparison.high:+.1%}), {comparison.verdict}"


def _price(price: CostShare | None, name: str) -> str:
    value = None if price is None else getattr(price, name)
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{share:.1%}"


def _or_unknown(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
