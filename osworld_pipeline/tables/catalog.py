"""The catalog: a DuckDB file with the small tables and views over the trajectory parts, for people and their queries.

It is always built as a new file and swapped in. So a reader does not wait for a writer, a killed build leaves the old
catalog, and a part written after the build is visible at once through its view.
"""

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import duckdb

from osworld_pipeline.atomic_io import locked, remove_stale_temps, replacing
from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.file_locks import uses_lock_files
from osworld_pipeline.store.part_files import Manifest
from osworld_pipeline.tables.builds import UNION_TABLES, current_build, table_paths
from osworld_pipeline.tables.live_files import store_retired
from osworld_pipeline.tables.owned import known_columns
from osworld_pipeline.tables.part_views import PINNED_VIEWS, create_part_views, pin_snapshot, seed_tables
from osworld_pipeline.tables.sql_types import sql_type
from osworld_pipeline.tables.views import DERIVED

LOCK_TIMEOUT_S = 120.0
_VIEWS = {**PINNED_VIEWS, **DERIVED}
"""The statement that creates each view of a connection of our own, in an order in which all can be created."""
_READ_AS = {
    "task_config": "task_config::JSON AS task_config",
    "domain": "coalesce(domain, '') AS domain",
}
"""Columns of the small tables that the catalog converts; key columns are not NULL."""
KEYS = {
    "union_tasks": "domain, task_id",
    "train_tasks": "domain, task_id",
    "replay_buffer": "row_id",
    "checkpoints": "checkpoint_id",
}

_held: ContextVar["_Views | None"] = ContextVar("held_views", default=None)
"""Those of `one_snapshot`."""


def rebuild_catalog(state: StateDir) -> Path:
    """Builds the catalog from the existing tables (there may be none) and swaps it in; safe with concurrent rebuilds.

    Raises:
        TableError: a table's file is damaged or breaks its key; another rebuild holds the lock for too long.
        StoreError: the file system refused, the manifest of the compactions is damaged, or the state has a newer format
            or must be migrated first.
    """
    lock = state.root / "catalog.lock"
    with locked(lock, timeout_s=LOCK_TIMEOUT_S, error=TableError, what="the catalog"):
        remove_stale_temps(state.root)
        with replacing(state.catalog) as temp, _built_at(temp) as database:
            try:
                seed_tables(state)
                database.write_bytes(_views_alone())
                with _connect(database) as connection:
                    _create_tables(connection, state)
                    store_retired(connection, Manifest.read(state.trajectories))
            except duckdb.Error as error:
                raise TableError(f"cannot build the catalog {state.catalog}: {first_line(error)}") from error
            # DuckDB must not replay the log of a process that died while writing the old file.
            Path(f"{state.catalog}.wal").unlink(missing_ok=True)
    return state.catalog


@contextmanager
def _built_at(path: Path) -> Iterator[Path]:
    """The path at which DuckDB builds the file that ends at `path`."""
    if not uses_lock_files(path.absolute().parent):
        try:
            yield path
        finally:
            Path(f"{path}.wal").unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="catalog-") as folder:
        yield Path(folder) / path.name
        shutil.copyfile(Path(folder) / path.name, path)


@contextmanager
def openable(catalog: Path) -> Iterator[Path]:
    """The catalog, for reading; a copy if its file system has no locks, which DuckDB needs."""
    if not uses_lock_files(catalog.absolute().parent):
        yield catalog
        return
    with tempfile.TemporaryDirectory(prefix="catalog-") as folder:
        yield Path(shutil.copyfile(catalog, Path(folder) / catalog.name))


@contextmanager
def fresh_views(state: StateDir, *names: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """The same tables and views in memory, in a new snapshot or in that of `one_snapshot`: for code that must not
    depend on the last rebuild. `names`: the views that the block reads; there are all small tables, but no other view
    unless these need it. Creating one takes milliseconds. Without names there are all.

    Raises:
        TableError: a table's file is damaged or breaks its key, or a query in this block is refused.
        StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
    """
    held = _held.get()
    if held is not None and held.state.root == state.root:
        with explained(f"the tables in {state.root}"):
            held.create(names)
            yield held.connection
        return
    with _views_of(state) as views:
        views.create(names)
        yield views.connection


@contextmanager
def one_snapshot(state: StateDir) -> Iterator[None]:
    """All calls of `fresh_views` in this block share one connection with one snapshot: results are consistent, and the
    tables and views are created once.

    Raises:
        TableError, StoreError: as fresh_views.
    """
    with _views_of(state) as views:
        token = _held.set(views)
        try:
            yield
        finally:
            _held.reset(token)


class _Views:
    """The small tables and a snapshot of the parts; views are created when they are asked for."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
        self.connection, self.state = connection, state
        self._created: set[str] = set()
        # The files of a build do not change: read them in place, as far as a query needs.
        _create_tables(connection, state, as_views=() if current_build(state) is None else UNION_TABLES)
        seed_tables(state)
        pin_snapshot(connection, state)

    def create(self, names: Collection[str]) -> None:
        """Those with these names and the views that they read; without names all."""
        for name in _with_those_below(frozenset(names or _VIEWS)):
            if name not in self._created:
                self.connection.execute(_VIEWS[name])
                self._created.add(name)


@contextmanager
def _views_of(state: StateDir) -> Iterator[_Views]:
    with _connect(":memory:") as connection, explained(f"the tables in {state.root}"):
        yield _Views(connection, state)


@functools.cache
def _with_those_below(names: frozenset[str]) -> tuple[str, ...]:
    """These views and all that they read, in the order of creation."""
    wanted, ordered = set(names), list(_VIEWS)
    for index, name in reversed([*enumerate(ordered)]):
        if name in wanted:
            wanted |= set(ordered[:index]) & set(re.findall(r"\w+", _VIEWS[name]))  # a view reads only views before it
    return tuple(name for name in ordered if name in wanted)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Converts DuckDB's errors to a TableError that names what cannot be read."""
    try:
        yield
    except duckdb.Error as error:
        raise TableError(f"cannot read {what}: {first_line(error)}") from error


def first_line(error: duckdb.Error) -> str:
    return str(error).strip().splitlines()[0]


@functools.cache
def _views_alone() -> bytes:
    """A catalog file with views and no tables, cached because creating the views takes most of a rebuild. They contain
    no path, so they are the same in every state. They resolve their tables when used."""
    with tempfile.TemporaryDirectory(prefix="catalog-") as folder:
        state, file = StateDir(Path(folder)), Path(folder) / "views.duckdb"
        with _connect(file) as connection:
            _create_tables(connection, state)
            create_part_views(connection, state)
            _create_derived(connection)
            for name in OWNED_TABLES:
                connection.execute(f"DROP TABLE {name}")
        return file.read_bytes()


def _connect(database: Path | str) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(database))
    connection.execute(f"SET threads = {min(4, os.cpu_count() or 1)}")
    connection.execute("SET enable_progress_bar = false")  # it would be printed to standard output
    return connection


def _create_tables(connection: duckdb.DuckDBPyConnection, state: StateDir, *, as_views: Collection[str] = ()) -> None:
    """Creates the small tables as copies of their files, or as views for `as_views`."""
    paths = table_paths(state)  # once, so that the tables of the union are of one build
    for name in OWNED_TABLES:
        rows = _rows_of(paths[name], name)
        connection.execute(f"CREATE {'VIEW' if name in as_views else 'TABLE'} {name} AS {rows}")
        if name in KEYS and name not in as_views:
            connection.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({KEYS[name]})")


def _create_derived(connection: duckdb.DuckDBPyConnection) -> None:
    for sql in DERIVED.values():
        connection.execute(sql)


def _rows_of(path: Path, name: str) -> str:
    """A query of a small table's file, with exactly our columns; without rows if there is no file."""
    schema = OWNED_TABLES[name]
    known = known_columns(path, name)
    quoted = str(path.resolve()).replace("'", "''")
    source = "(SELECT 1) WHERE false" if known is None else f"read_parquet('{quoted}')"
    values = {column: f'"{column}"' if column in (known or ()) else "NULL" for column in schema.names}
    columns = ", ".join(f'CAST({values[one.name]} AS {sql_type(one.type)}) AS "{one.name}"' for one in schema)
    shown = ", ".join(_READ_AS.get(column, f'"{column}"') for column in schema.names)
    return f"SELECT {shown} FROM (SELECT {columns} FROM {source})"  # noqa: S608 - our own names
