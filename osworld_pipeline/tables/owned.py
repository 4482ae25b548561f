"""The small tables, each owned by one asset: a Parquet file under `tables/`, replaced as a whole. Those of the union
are replaced together (builds.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import remove_stale_temps, write_parquet
from osworld_pipeline.columns import OWNED_TABLES, conform
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.builds import table_paths


def table_path(state: StateDir, name: str) -> Path:
    """The current path of a table; for several tables use `one_build`. Raises TableError."""
    if name not in OWNED_TABLES:
        raise TableError(f"no table named '{name}'; there are: {', '.join(OWNED_TABLES)}")
    return table_paths(state)[name]


def write_table(state: StateDir, name: str, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Path:
    """Replaces a table by `rows`.

    Raises:
        TableError: no such table, or a value that its columns cannot hold.
        StoreError: the file system refused.
    """
    path = table_path(state, name)
    try:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=OWNED_TABLES[name])
        table = conform(table, OWNED_TABLES[name])
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise TableError(f"a value in a row of {name} does not fit its column: {error}") from error
    remove_stale_temps(path.parent)
    write_parquet(path, table)
    return path


def need_known_columns(state: StateDir, name: str) -> None:
    """Raises TableError if the table has columns of a newer program, which a new file of ours would lose."""
    path = table_path(state, name)
    unknown = sorted(set(known_columns(path, name) or ()) - set(OWNED_TABLES[name].names))
    if unknown:
        raise TableError(
            f"{path} has columns that this version does not know ({', '.join(unknown)}), and writing it would lose "
            "them: use the version that wrote it, or a newer one"
        )


def read_table(state: StateDir, name: str) -> pa.Table:
    """The table; without rows if it has not been written yet.

    Raises:
        TableError: no such table, or its file is damaged.
    """
    return read_table_file(table_path(state, name), name)


def read_table_file(path: Path, name: str) -> pa.Table:
    """The table of that name in a file, as read_table. Raises TableError."""
    try:
        return conform(pq.read_table(path), OWNED_TABLES[name])
    except FileNotFoundError:
        return OWNED_TABLES[name].empty_table()
    except pa.ArrowException as error:
        raise _damaged(path, name, error) from error


def known_columns(path: Path, name: str) -> list[str] | None:
    """The columns of a table's file; None if there is no file. Raises TableError if it is damaged."""
    try:
        return pq.read_schema(path).names
    except FileNotFoundError:
        return None
    except pa.ArrowException as error:
        raise _damaged(path, name, error) from error


def _damaged(path: Path, name: str, error: Exception) -> TableError:
    return TableError(f"{path} is damaged ({error}): remove it and materialize {name} again")
