"""The first rows of a table as Markdown, with long texts truncated."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.errors import TableError

MAX_ROWS = 5
MAX_TEXT = 80
NOTHING = "(no rows)"


def preview_table(path: Path, *, num_rows: int = MAX_ROWS) -> str:
    """The first rows of a Parquet file; only they are read.

    Raises:
        TableError: the file is damaged.
    """
    if not path.is_file():
        return NOTHING
    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=num_rows), None)
            names = file.schema_arrow.names
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged ({error}): remove it and materialize it again") from error
    rows = [] if batch is None else batch.to_pylist()
    return markdown_table(names, [[row[name] for name in names] for row in rows])


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in ([_cell(value) for value in row] for row in rows)]
    if not lines:
        return NOTHING
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines])


def _cell(value: Any) -> str:
    """The value on one line, with Markdown escaped."""
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else _json(value)
    text = " ".join(text[: 4 * MAX_TEXT].split())
    text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    for mark in "\\|<>`*_[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
