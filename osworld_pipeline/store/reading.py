"""Reads files of parts of any version as Arrow tables with the current columns."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from osworld_pipeline.columns import conform, stored
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.footers import read_footer

compute: Any = pyarrow.compute
"""Typed as Any: its functions are created at import, so a type checker does not see them."""


def read_part_table(
    path: Path, table: str, *, columns: Sequence[str] = (), row_groups: Sequence[int] | None = None
) -> pa.Table:
    """Reads a file of `table` (only `columns`, if given), or some of its row groups.

    Raises:
        StoreError: it is missing or damaged.
    """
    if row_groups is not None and not row_groups:
        return _schema(table, columns).empty_table()
    with _opened(path) as file:
        return _read(file, table, columns, row_groups)


def read_rows(path: Path, table: str, column: str, values: Iterable[str], *, columns: Sequence[str] = ()) -> pa.Table:
    """The rows whose `column` is one of `values`; row groups that cannot have one are skipped. Raises like
    read_part_table."""
    wanted = sorted(set(values))
    groups = row_groups_with(path, column, wanted)
    found: list[pa.Table] = []
    if groups:
        with _opened(path) as file:
            for number in groups:
                # Read one column first: a row group often has few or no matches.
                places = _places(file, table, column, number, wanted)
                if len(places):
                    found.append(_read(file, table, columns, [number]).take(places))
    return pa.concat_tables(found) if found else _schema(table, columns).empty_table()


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Raises StoreError, also for errors while the file is read."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: restore it from a copy, or run its stage again") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it and run its stage again") from error


def _read(file: pq.ParquetFile, table: str, columns: Sequence[str], row_groups: Sequence[int] | None) -> pa.Table:
    schema = _schema(table, columns)
    present = set(file.schema_arrow.names)
    known = [name for name in schema.names if name in present]
    found = file.read(columns=known) if row_groups is None else file.read_row_groups(row_groups, columns=known)
    return conform(found, schema)


def _schema(table: str, columns: Sequence[str]) -> pa.Schema:
    """The current columns of `table`; only `columns`, if given."""
    schema = stored(table)
    return pa.schema([schema.field(name) for name in columns]) if columns else schema


def row_groups_with(path: Path, column: str, values: Sequence[str]) -> list[int]:
    """The row groups that may have one of `values`, which are sorted. Raises StoreError."""
    try:
        return read_footer(path).row_groups(column, values)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: restore it from a copy, or run its stage again") from error


def row_groups_from(path: Path, column: str, prefix: str) -> list[int]:
    """The row groups that may have text with this prefix. Raises StoreError."""
    try:
        footer = read_footer(path)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: restore it from a copy, or run its stage again") from error
    ranges = footer.ranges.get(column, (None,) * footer.num_row_groups)
    return [
        number
        for number, found in enumerate(ranges)
        if found is None or (found[0][: len(prefix)] <= prefix <= found[1])
    ]


def _places(file: pq.ParquetFile, table: str, column: str, number: int, values: Sequence[str]) -> pa.Array:
    rows = _read(file, table, [column], [number])
    if rows.num_rows == 0:
        return pa.array([], pa.uint64())  # Arrow 25 crashes on a column without chunks
    return compute.indices_nonzero(compute.is_in(rows[column], pa.array(values, pa.string())))
