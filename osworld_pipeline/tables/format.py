"""Query results: a table for people; JSON, CSV or Parquet for programs."""

import csv
import io
import json
import math
import re
import shutil
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import parquet_bytes
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.query import TIMEOUT_S, QueryResult, query_arrow, run_query

MAX_LINES_A_ROW = 3
NUM_HEADER_LINES = 5
"""Of a table: blank, names, rule, blank, count."""
FORMATS = ("table", "json", "csv", "parquet")
# What a model wrote must not steer the terminal it is shown on.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def answer(state: StateDir, sql: str, fmt: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """What `sql` gives, as a file of that format.

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
    raise TableError(f"no format named '{fmt}'; there are: {', '.join(FORMATS)}")


def _table(result: QueryResult) -> str:
    """A row a line; where folded rows would take more than MAX_LINES_A_ROW, a column a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell(value: Any) -> Text:
        return Text("NULL", style="dim") if value is None else Text(_visible(_cell(value)))

    sink = io.StringIO()
    console = Console(file=sink, width=max(100, shutil.get_terminal_size().columns), no_color=True)

    def lines(*tables: Table) -> list[str]:
        sink.seek(0)
        sink.truncate()
        for one in tables:
            console.print(one)
        return [line.rstrip() for line in sink.getvalue().rstrip().splitlines()]

    table = Table(box=box.SIMPLE_HEAD, caption=_count(len(result.rows)), caption_justify="left")
    for index, name in enumerate(result.columns):
        is_number = any(isinstance(row[index], int | float) for row in result.rows)
        table.add_column(Text(_visible(name)), justify="right" if is_number else "left", overflow="fold")
    for row in result.rows:
        table.add_row(*map(cell, row))
    across = lines(table)
    if len(across) - NUM_HEADER_LINES <= MAX_LINES_A_ROW * len(result.rows):
        return "\n".join(across)
    listed = []
    for number, row in enumerate(result.rows, start=1):
        one = Table(box=None, show_header=False, title=f"row {number}", title_justify="left", pad_edge=False)
        one.add_column(no_wrap=True)
        one.add_column(overflow="fold")
        for name, value in zip(result.columns, row, strict=True):
            one.add_row(Text(_visible(name), style="dim"), cell(value))
        listed.append(one)
    return "\n".join([*lines(*listed), "", _count(len(result.rows))])


def _count(num_rows: int) -> str:
    return "1 row" if num_rows == 1 else f"{num_rows:,} rows"


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def _cell(value: Any, *, is_exact: bool = False) -> str:
    if isinstance(value, float):
        return repr(value) if is_exact else f"{value:.6g}"
    if isinstance(value, list | dict | tuple):
        return json.dumps(_plain(value), ensure_ascii=False)
    return str(value)


def _plain(value: Any) -> Any:
    """JSON knows neither dates, bytes nor NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)
