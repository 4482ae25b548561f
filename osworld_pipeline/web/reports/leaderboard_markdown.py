"""A leaderboard as Markdown, for Dagster's pages."""

from collections import Counter
from collections.abc import Mapping, Sequence

from osworld_pipeline.evaluation.leaderboard import Leaderboard, LeaderboardRow, LeaderboardTable, Versus
from osworld_pipeline.evaluation.scores import is_mixed
from osworld_pipeline.web.formats import UNKNOWN, number, percent, points
from osworld_pipeline.web.names import stage_name

_COLUMNS = (
    "rank", "checkpoint", "stage", "success", "interval", "strict", "episodes", "faults", "missing",
    "points against parent", "points against best", "tokens per success", "desktop s per success",
)  # fmt: skip
_WHY_SPLIT = "Not ranked together with the other tables of this evaluation: other desktop image or grader."
_WHY_MIXED = "Not ranked: its episodes were graded on several desktop images or by several versions of the grader."


def leaderboard_markdown(board: Leaderboard) -> str:
    """A table for each evaluation key and its desktops, under a line that describes the evaluation."""
    if not board.tables:
        return "No checkpoint has been evaluated yet.\n"
    num_tables = Counter(table.evaluation_key for table in board.tables)
    return "\n".join(
        _markdown_table(table, board.confidence, is_split=num_tables[table.evaluation_key] > 1)
        for table in board.tables
    )


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
        number(row.rank),
        f"`{score.checkpoint_id}`",
        f"{row.source_dataset} (import)" if row.source_dataset else stage_name(score.stage),
        percent(score.lenient.value),
        f"{percent(score.low)} to {percent(score.high)}",
        percent(score.strict.value),
        f"{score.successes}/{score.n}",
        ", ".join(f"{count} {outcome}" for outcome, count in score.faults.items()) or "0",
        number(score.num_missing),
        _difference(row.versus_parent),
        _difference(row.versus_best),
        number(price.response_tokens if price else None),
        number(price.desktop_s if price else None),
    )
    return f"| {' | '.join(cells)} |"


def _difference(versus: Versus | None) -> str:
    comparison = versus.changes.comparison if versus else None
    if comparison is None:
        return UNKNOWN
    interval = f"{points(comparison.low)} to {points(comparison.high)}"
    return f"{points(comparison.difference)} ({interval}), {comparison.verdict}"
