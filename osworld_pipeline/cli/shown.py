"""What commands show to people: tables in which an id is never cut, for it is there to be copied, and sentences on
standard error about what is being done."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

NUMBERS = frozenset({"updates", "success", "interval", "strict", "n", "faults"})
"""Columns that stand at their right edge."""


class ScoreLine(NamedTuple):
    """Of one checkpoint on one suite."""

    suite: str
    checkpoint: str
    success: float | None
    interval: tuple[float | None, float | None]
    strict: float | None
    num_success: int
    num_valid: int
    num_faults: int


def say(sentence: str, *, as_json: bool = False) -> None:
    """On standard error, at once; with --json nothing is said."""
    if not as_json:
        Console(stderr=True).print(sentence, highlight=False, markup=False, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """`1 task`, `52 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def planned_evaluations(checkpoint_ids: Sequence[str], on: str, *, recipe: str, num_tasks: int, num_seeds: int) -> str:
    """What will be evaluated, in a sentence. `num_tasks`: of all suites together."""
    episodes = counted(len(checkpoint_ids) * num_tasks * num_seeds, "episode")
    checkpoints = f"{counted(len(checkpoint_ids), 'checkpoint')}, " if len(checkpoint_ids) > 1 else ""
    return (
        f"{', '.join(checkpoint_ids)} on {on}, as recipe {recipe} says: {episodes} ({checkpoints}"
        f"{counted(num_tasks, 'task')}, {counted(num_seeds, 'seed')}); what is finished is not run again"
    )


def show_table(rows: Sequence[Mapping[str, str]], console: Console, *, spare: Sequence[str] = ()) -> None:
    """A line for each row, no cell cut or folded. `spare`: columns that are left out, the first of them first, while
    the table is wider than the terminal; the last line names them. What is no terminal has no width: all is shown."""
    names, left_out = list(rows[0]) if rows else [], []
    table = _table(names, rows)
    for name in spare:
        if not console.is_terminal or _width(table, console) <= console.width:
            break
        names.remove(name)
        left_out.append(name)
        table = _table(names, rows)
    console.size = max(console.width, _width(table, console)), console.height
    console.print(table)
    if left_out:
        told = f"too wide for this terminal: {', '.join(left_out)} (--json has all)"
        console.print(told, style="dim", highlight=False)


def show_scores(lines: Sequence[ScoreLine], console: Console) -> None:
    """A table for each suite, in the order they come in."""
    for suite, scores in groupby(lines, key=lambda line: line.suite):
        console.print(f"suite {suite}", style="bold", highlight=False, markup=False, soft_wrap=True)
        show_table([_score_row(score) for score in scores], console, spare=["strict"])


def _score_row(score: ScoreLine) -> dict[str, str]:
    low, high = score.interval
    return {
        "checkpoint": score.checkpoint,
        "success": _percent(score.success),
        "interval": "-" if low is None and high is None else f"{_percent(low)} - {_percent(high)}",
        "strict": _percent(score.strict),
        "n": f"{score.num_success}/{score.num_valid}",
        "faults": str(score.num_faults),
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _table(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=2**16)).maximum
