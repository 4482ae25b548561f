"""Query results: a table for people; JSON, CSV or Parquet for programs."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from osworld_pipeline.atomic_io import parquet_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.query import TIMEOUT_S, QueryResult, query_arrow, run_query

WIDTH, MIN_WIDTH = 100, 20
"""Width without a terminal and COLUMNS, and the minimum width."""
MAX_ROWS, MAX_LISTED_ROWS = 1_000, 40
"""Rows shown in the two layouts: one line per row, and one line per column."""
MAX_CELL = 500
"""Characters shown of a value."""
MAX_LINES_A_ROW = 3
MIN_COLUMN = 10
"""Minimum width of a column."""
NUM_HEADER_LINES = 3
"""Header lines: a blank line, the names and a rule."""
_AS_TEXT = ("table", "json", "csv")
FORMATS = (*_AS_TEXT, "parquet")
# Control characters in a model's output must not reach the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def answer(state: StateDir, sql: str, fmt: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """The result of `sql` as a file of that format.

    Raises:
        TableError: no such format, or as run_query.
    """
    if fmt == "parquet":
        return parquet_bytes(query_arrow(state, sql, timeout_s=timeout_s))
    if fmt not in FORMATS:
        raise TableError(f"no format named '{fmt}'; there are: {', '.join(FORMATS)}")
    return f"{render(run_query(state, sql, timeout_s=timeout_s), fmt)}\n".encode(errors="replace")


def render(result: QueryResult, fmt: str) -> str:
    """The result as `table`, `json` (a list of objects) or `csv` (with a header).

    Raises:
        TableError: no such format.
    """
    if fmt == "table":
        return _table(result)
    if fmt == "json":
        rows = [dict(zip(result.columns, map(_plain, row), strict=True)) for row in result.rows]
        return json.dumps(rows, ensure_ascii=False, indent=2)
    if fmt == "csv":
        sink = io.StringIO()
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow(result.columns)
        writer.writerows(
            [["" if value is None else _cell(value, is_exact=True) for value in row] for row in result.rows]
        )
        return sink.getvalue().removesuffix("\n")
    if fmt in FORMATS:
        raise TableError(f"the format '{fmt}' is not text: choose one of {', '.join(_AS_TEXT)}, or use `query`")
    raise TableError(f"no format named '{fmt}'; there are: {', '.join(FORMATS)}")


def _table(result: QueryResult) -> str:
    """One line per row, or one line per column if columns would be too narrow or rows too high. Many rows and long
    values are truncated, with the total."""
    rows = result.rows[:MAX_ROWS]
    few = rows[:MAX_LISTED_ROWS]
    lines = _across(result.columns, few)
    if lines is not None and len(rows) > len(few):
        lines = _across(result.columns, rows)
    if lines is None:
        rows, lines = few, _listed(result.columns, few)
    num_more = len(result.rows) - len(rows)
    last = f"… {_counted(num_more, 'more row')}: --format csv shows all" if num_more else _counted(len(rows), "row")
    return "\n".join([*lines, "", last])


def _across(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str] | None:
    """None if this layout is not readable."""
    table = Table(box=box.SIMPLE_HEAD)
    names, cells = list(map(_name, columns)), [list(map(_value, row)) for row in rows]
    num_needed = 1
    for index, name in enumerate(names):
        is_number = any(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
        widest = max(
            cell_len(line) for text in (name, *(row[index] for row in cells)) for line in text.plain.split("\n")
        )
        num_needed += min(widest, MIN_COLUMN) + 3
    for row in cells:
        table.add_row(*row)
    if num_needed > _terminal_width():
        return None
    lines = _drawn(table)
    return lines if len(lines) - NUM_HEADER_LINES <= MAX_LINES_A_ROW * max(1, len(rows)) else None


def _listed(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    tables = []
    for number, row in enumerate(rows, start=1):
        table = Table(box=None, show_header=False, title=f"row {number}", title_justify="left", pad_edge=False)
        table.add_column(style="dim", overflow="fold")
        table.add_column(overflow="fold")
        for name, value in zip(columns, row, strict=True):
            table.add_row(_name(name), _value(value))
        tables.append(table)
    return _drawn(*tables) if rows else [_visible(name) for name in columns]


def _drawn(*tables: Table) -> list[str]:
    sink = io.StringIO()
    # With only a width given, rich uses 80 if TERM is dumb.
    console = Console(file=sink, width=_terminal_width(), height=1, no_color=True)
    for table in tables:
        console.print(table)
    return [line.rstrip() for line in sink.getvalue().rstrip().splitlines()]


def _terminal_width() -> int:
    return max(MIN_WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _name(name: str) -> Text:
    return Text(_visible(name))


def _value(value: Any) -> Text:
    if value is None:
        return Text("NULL", style="dim")
    text = _cell(value)
    more = f"… ({len(text):,} characters)" if len(text) > MAX_CELL else ""
    return Text(_visible(text[:MAX_CELL]) + more)


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def _cell(value: Any, *, is_exact: bool = False) -> str:
    if isinstance(value, float):
        if is_exact:
            return repr(value)
        return f"{value:.1f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, list | dict | tuple):
        return json.dumps(_plain(value), ensure_ascii=False)
    return str(value)


def _plain(value: Any) -> Any:
    """A JSON value: JSON has no dates, bytes or NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)
