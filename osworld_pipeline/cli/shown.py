"""Output of commands for the terminal: tables in which ids are not truncated, so that they can be copied, and progress
sentences on standard error."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

NUMBERS = frozenset({"updates", "success", "interval", "strict", "n", "faults"})
"""Right-aligned columns."""


class ScoreLine(NamedTuple):
    """The score of one checkpoint on one suite."""

    suite: str
    checkpoint: str
    success: float | None
    interval: tuple[float | None, float | None]
    strict: float | None
    num_success: int
    num_valid: int
    num_faults: int


def say(sentence: str, *, as_json: bool = False) -> None:
    """Prints to standard error at once; with --json nothing is printed."""
    if not as_json:
        Console(stderr=True).print(sentence, highlight=False, markup=False, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """`1 task`, `52 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def planned_evaluations(checkpoint_ids: Sequence[str], on: str, *, recipe: str, num_tasks: int, num_seeds: int) -> str:
    """A sentence about the evaluations to run. `num_tasks`: of all suites together."""
    episodes = counted(len(checkpoint_ids) * num_tasks * num_seeds, "episode")
    checkpoints = f"{counted(len(checkpoint_ids), 'checkpoint')}, " if len(checkpoint_ids) > 1 else ""
    return (
        f"{', '.join(checkpoint_ids)} on {on}, with recipe {recipe}: {episodes} ({checkpoints}"
        f"{counted(num_tasks, 'task')}, {counted(num_seeds, 'seed')}); finished ones are not repeated"
    )


def show_table(rows: Sequence[Mapping[str, str]], console: Console, *, spare: Sequence[str] = ()) -> None:
    """One line per row, without truncated or wrapped cells. `spare`: columns to omit, in this order, while the table is
    wider than the terminal; the last line names them. Without a terminal all columns are shown."""
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
        note = f"too wide for this terminal: {', '.join(left_out)} (--json has all)"
        console.print(note, style="dim", highlight=False)


def show_scores(lines: Sequence[ScoreLine], console: Console) -> None:
    """A table for each suite, in the given order."""
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
