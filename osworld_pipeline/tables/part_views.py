"""The views over the trajectory parts. If the variables of a snapshot are set, the views read the files of this
snapshot; otherwise (a notebook that opens the catalog without this package) they read the live files that the manifest
names, and do not open files that were retired before the last rebuild of the catalog. DuckDB plans only one of the two:
the view selects the SQL text when a query is bound.

A view contains no path: it reads the folders next to the catalog, so that a copy or a mount of the state works. Within
a view, only one setting shows the location of the database: the temporary folder, which DuckDB would create next to the
file.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import parquet_bytes, write_file
from osworld_pipeline.columns import PART_TABLES, marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.old_tokens import need_sequences
from osworld_pipeline.store.part_files import (
    COMPACTED,
    DETAILS_OF,
    HEAD_OF,
    SEED,
    HeadFiles,
    Manifest,
    begin_format,
    take_snapshot,
)
from osworld_pipeline.tables.live_files import live_files_sql, not_retired_sql, store_retired
from osworld_pipeline.tables.sql_types import sql_type

_HERE = """CASE
    WHEN getvariable('osworld_state') IS NOT NULL THEN concat(getvariable('osworld_state'), '/')
    WHEN regexp_matches(current_setting('temp_directory'), '/[^/]+[.]tmp$')
        THEN regexp_replace(current_setting('temp_directory'), '[^/]+$', '')
    ELSE error('open osworld.duckdb as the database, or say where it is: SET VARIABLE osworld_state = its folder')
END"""
"""The state folder, with a slash."""
_PLACE = f"({_HERE} || 'trajectories/')"


def create_part_views(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """Views named as PART_TABLES, which any client of the catalog can read; creating them reads no part."""
    seed_tables(state)
    # With these variables set, DuckDB plans only the shorter of the two SQL texts of each view here.
    _set_variables(connection, {name: [] for name in _VARIABLES}, state)
    store_retired(connection, Manifest())
    for table in PART_TABLES:
        connection.execute(f"CREATE VIEW {table} AS {_view(table)}")


def create_pinned_views(connection: duckdb.DuckDBPyConnection, state: StateDir, *names: str) -> None:
    """The same views (with `names`, only these) for a connection of our own, pinned to the current files;
    `pin_snapshot` updates them. They skip the choice of the text, which takes time in each query. Raises StoreError."""
    seed_tables(state)
    pin_snapshot(connection, state)
    for name in names or PINNED_VIEWS:
        connection.execute(PINNED_VIEWS[name])


def pin_snapshot(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    """Pins the views of `connection` to the current files, for all following queries. Raises StoreError."""
    need_sequences(state.trajectories)
    pin_files(connection, state, {head: take_snapshot(state.trajectories, head) for head in DETAILS_OF})


def pin_files(connection: duckdb.DuckDBPyConnection, state: StateDir, found: Mapping[str, HeadFiles]) -> None:
    """Pins the views of `connection` to these files, given by head table."""
    lists: dict[str, Sequence[str]] = {}
    for head, files in found.items():
        for table in (head, *DETAILS_OF[head]):
            lists[f"{table}_compacted"] = [f"{COMPACTED}/{name}" for name in files.compacted]
            lists[f"{table}_small"] = [file.name for file in files.small]
        lists[f"{head}_rewritten"] = sorted(files.rewritten)
    _set_variables(connection, lists, state)


def _set_variables(connection: duckdb.DuckDBPyConnection, lists: Mapping[str, Sequence[str]], state: StateDir) -> None:
    for name, values in lists.items():
        table, _, kind = name.rpartition("_")
        if kind != "rewritten":
            folder = _folder(state, table)
            values = [f"{folder}/{file}" for file in (SEED, *values)]
        quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        connection.execute(f"SET VARIABLE osworld_{name} = [{quoted}]::VARCHAR[]")


def seed_tables(state: StateDir) -> None:
    """Writes a file without rows next to the parts of each table, because an empty glob is an error.

    Raises:
        StoreError: the state has a newer format, or one that must be migrated first.
    """
    need_sequences(state.trajectories)
    for table in PART_TABLES:
        schema = stored(table)
        for folder in (state.trajectories / table, state.trajectories / table / COMPACTED):
            path = folder / SEED
            if not set(schema.names) <= set(_columns_of(path)):  # that of a newer program has more
                write_file(path, _without_rows(table))
    begin_format(state.trajectories)


@functools.cache
def _without_rows(table: str) -> bytes:
    return parquet_bytes(marked(stored(table).empty_table()))


_VARIABLES = tuple(
    f"{table}_{kind}"
    for table in PART_TABLES
    for kind in ("compacted", "small", *(("rewritten",) if table in DETAILS_OF else ()))
)


# Before schema version 6 the rows of a training stage named its parent.
_TRAINED = 'CASE WHEN {condition} p."update" >= 0 THEN p.stage_key ELSE p.checkpoint_id END'
# Files count updates from 0, views from 1, as reports, MLflow and messages do.
_UPDATE = 'p."update" + (p."update" >= 0)::INTEGER'
# Before schema version 7 there were no timestamps.
_UTC = "make_timestamp(CAST({unix_time} * 1000000 AS BIGINT))"
_AS_READ: Mapping[tuple[str, str], str] = {
    ("episodes", "checkpoint_id"): _TRAINED.format(condition="p.purpose = 'train' AND"),
    ("rollout_groups", "checkpoint_id"): _TRAINED.format(condition=""),
    **{(table, "update"): _UPDATE for table in ("episodes", "steps", "rollout_groups", "injections")},
    ("episodes", "started_utc"): f"coalesce(p.started_utc, {_UTC.format(unix_time='nullif(p.started_at, 0)')})",
    ("episodes", "ended_utc"): "coalesce(p.ended_utc, "
    + _UTC.format(unix_time="(nullif(p.started_at, 0) + p.times_s['total'])")
    + ")",
}
"""Columns that a view converts from the files."""


def _view(table: str) -> str:
    texts = (_text(_rows(table, branches)) for branches in (_living(table), _snapshot(table)))
    return "FROM query(CASE WHEN getvariable('osworld_{}_compacted') IS NULL THEN {} ELSE {} END)".format(table, *texts)


def _quoted(column: str) -> str:
    return f'p."{column}"'


def _rows(table: str, branches: Sequence[str]) -> str:
    columns = ", ".join(
        f'CAST({_AS_READ.get((table, field.name)) or _quoted(field.name)} AS {sql_type(field.type)}) AS "{field.name}"'
        for field in PART_TABLES[table]
    )
    return " UNION ALL ".join(f"SELECT {columns} FROM {branch}" for branch in branches)  # noqa: S608 - our own names


def _snapshot(table: str) -> list[str]:
    """Rows `p` of compacted files, except parts that were rewritten since, and of single parts."""
    rewritten = f"SELECT unnest(getvariable('osworld_{HEAD_OF.get(table, table)}_rewritten')) AS part"
    compacted, small = (_scan(f"getvariable('osworld_{table}_{kind}')") for kind in ("compacted", "small"))
    return [f"{compacted} p ANTI JOIN ({rewritten}) USING (part)", f"{small} p"]


def _living(table: str) -> list[str]:
    """Rows `p` of the live files by the manifest and the folders. These files come first in the join, so that their
    folders are listed first."""
    folder = f"{_PLACE} || '{table}'"
    live = f"({live_files_sql(table, folder, _PLACE)})"
    rows = _scan(f"[{folder} || '/*.parquet', {folder} || '/{COMPACTED}/*.parquet']", stored(table))
    replaced = f"SELECT part FROM {live} WHERE NOT is_compacted"  # noqa: S608 - our own names
    counts = f"NOT (l.is_compacted AND p.part IN ({replaced})) AND {not_retired_sql(table, 'p.filename')}"
    return [f"{live} l JOIN {rows} p ON p.filename = l.file WHERE {counts}"]


def _scan(files: str, schema: Iterable[pa.Field] | None = None) -> str:
    """`schema`: without it, each file is opened when the query is planned, which is faster if all are read."""
    if schema is None:
        return f"read_parquet({files}, union_by_name = true)"
    columns = ", ".join(
        f"'{field.name}': {{'name': '{field.name}', 'type': '{sql_type(field.type)}', 'default_value': NULL}}"
        for field in schema
    )
    return f"read_parquet({files}, filename = true, schema = MAP {{{columns}}})"


PINNED_VIEWS: Mapping[str, str] = {
    table: f"CREATE VIEW {table} AS {_rows(table, _snapshot(table))}" for table in PART_TABLES
}
"""The statement that creates each view of `create_pinned_views`; none reads another."""


def _text(sql: str) -> str:
    return "'" + sql.replace("'", "''") + "'"


def _folder(state: StateDir, table: str) -> str:
    return str((state.trajectories / table).resolve())


def _columns_of(path: Path) -> list[str]:
    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return []
