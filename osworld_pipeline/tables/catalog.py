"""The catalog: a DuckDB file with the small tables and views over the trajectory parts, for people and their queries.

It is always built as a new file and swapped in. So a reader never waits for a writer, a killed build leaves the old
catalog, and a part written after the build shows at once through its view.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import duckdb

from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import locked, remove_stale_temps, replacing
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.builds import table_paths
from osworld_pipeline.tables.owned import read_table_file
from osworld_pipeline.tables.part_views import create_part_views, pin_snapshot
from osworld_pipeline.tables.views import DERIVED

LOCK_TIMEOUT_S = 120.0
_READ_AS = {
    "task_config": "task_config::JSON AS task_config",
    "domain": "coalesce(domain, '') AS domain",
}
"""Columns of the small tables that the catalog shows in another form; a part of a key is never NULL."""
KEYS = {
    "union_tasks": "domain, task_id",
    "train_tasks": "domain, task_id",
    "replay_buffer": "row_id",
    "checkpoints": "checkpoint_id",
}

_held: ContextVar[tuple[Path, duckdb.DuckDBPyConnection] | None] = ContextVar("held_views", default=None)
"""The state's root, and the views that `one_snapshot` keeps for it."""


def rebuild_catalog(state: StateDir) -> Path:
    """Builds the catalog from what there is (nothing yet is fine) and swaps it in; safe beside other rebuilds.

    Raises:
        TableError: a table's file is damaged or breaks its key; another rebuild holds the lock for too long.
        StoreError: the file system refused.
    """
    lock = state.root / "catalog.lock"
    with locked(lock, timeout_s=LOCK_TIMEOUT_S, error=TableError, what="the catalog's rebuild"):
        remove_stale_temps(state.root)
        with replacing(state.catalog) as temp:
            try:
                with duckdb.connect(str(temp)) as connection:
                    _define(connection, state)
            except duckdb.Error as error:
                raise TableError(f"cannot build the catalog {state.catalog}: {first_line(error)}") from error
            finally:
                Path(f"{temp}.wal").unlink(missing_ok=True)
            # A log left by someone who died writing into the old file must not be replayed into the new one.
            Path(f"{state.catalog}.wal").unlink(missing_ok=True)
    return state.catalog


@contextmanager
def fresh_views(state: StateDir) -> Iterator[duckdb.DuckDBPyConnection]:
    """The same tables and views in memory, all as of now, or within `one_snapshot` as of its beginning: for code of
    ours that must not depend on the last rebuild.

    Raises:
        TableError: as rebuild_catalog.
    """
    held = _held.get()
    if held is not None and held[0] == state.root:
        with explained(f"the tables in {state.root}"):
            yield held[1]
        return
    with duckdb.connect(":memory:") as connection, explained(f"the tables in {state.root}"):
        _define(connection, state)
        pin_snapshot(connection, state)
        yield connection


@contextmanager
def one_snapshot(state: StateDir) -> Iterator[None]:
    """In this block all calls of `fresh_views` share one snapshot: results are consistent, and files are read once.

    Raises:
        TableError: as rebuild_catalog.
    """
    with fresh_views(state) as connection:
        token = _held.set((state.root, connection))
        try:
            yield
        finally:
            _held.reset(token)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns DuckDB's errors into a TableError that says what cannot be read."""
    try:
        yield
    except duckdb.Error as error:
        raise TableError(f"cannot read {what}: {first_line(error)}") from error


def first_line(error: duckdb.Error) -> str:
    return str(error).strip().splitlines()[0]


def _define(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    connection.execute(f"SET threads = {min(4, os.cpu_count() or 1)}")
    connection.execute("SET enable_progress_bar = false")  # it would stand in answers on standard output
    paths = table_paths(state)  # once, so that the tables of the union are of one build
    for name, schema in OWNED_TABLES.items():
        connection.register("incoming", read_table_file(paths[name], name))
        columns = ", ".join(_READ_AS.get(column, f'"{column}"') for column in schema.names)
        connection.execute(f"CREATE TABLE {name} AS SELECT {columns} FROM incoming")  # noqa: S608 - our own names
        connection.unregister("incoming")
        if name in KEYS:
            connection.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({KEYS[name]})")
    create_part_views(connection, state)
    for sql in DERIVED.values():
        connection.execute(sql)
