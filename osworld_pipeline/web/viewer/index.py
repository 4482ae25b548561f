"""The index: the small columns of every episode and group in memory, one row each, updated from the store file by file.
Lists of 100,000 episodes are filtered and counted from the index.

The rows of a file are dropped when no snapshot contains the file any more. A part that a training run writes costs one
small read; a compaction costs one large read.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError, StoreError
from osworld_pipeline.store.old_tokens import need_sequences
from osworld_pipeline.tables.builds import table_paths
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.web.evaluation_names import own_suite_files, own_suites
from osworld_pipeline.web.viewer.files import StoreFiles, empty_rows, list_files, sql_list
from osworld_pipeline.web.viewer.index_sql import (
    FROM_FILES,
    NAMES,
    NAMES_OF_CHECKPOINTS,
    NAMES_OF_TASKS,
)
from osworld_pipeline.web.viewer.settings import BadQuestionError

log = logging.getLogger(__name__)
CHECK_EVERY_S = 1.0
"""Minimum interval between listings of the folders."""
QUERY_LIMIT_S = 20.0
OWNED = ("union_tasks", "checkpoints")
FILES = {
    "facts": ("episodes", "steps"),
    "grouped": ("rollout_groups", "injections"),
    "injected": ("rollout_groups", "injections"),
}
"""By table of the index: the head table and the details table of the store whose files contain its rows. Each file of
the head table has one file of the details table."""


class EpisodeIndex:
    """Thread-safe: each thread reads in its own transaction, and one at a time refreshes."""

    def __init__(self, state: StateDir) -> None:
        """Raises StoreError: the state has a newer format, or one that must be migrated first."""
        need_sequences(state.trajectories)
        self._state = state
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._checked_at = -CHECK_EVERY_S
        self._files: dict[str, StoreFiles] = {}
        self._owned: dict[str, tuple[int, int, int]] = {}
        self.generation = 0
        """Incremented with each change of the index."""
        self.problem = ""
        """Error of the last refresh, or empty; after an error the previous rows are still shown."""
        self._database = duckdb.connect(":memory:")
        for setting in (
            f"threads = {min(4, os.cpu_count() or 1)}",
            f"allowed_directories = {sql_list([str(state.trajectories.resolve())])}",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "enable_progress_bar = false",
        ):
            self._database.execute(f"SET {setting}")
        for statement in NAMES:
            self._database.execute(statement)
        for table in ("episodes", "steps", "rollout_groups", "injections"):
            self._database.register("incoming", empty_rows(stored(table)))
            self._database.execute(f"CREATE TABLE no_{table} AS SELECT * FROM incoming")  # noqa: S608
            self._database.unregister("incoming")
        for table in FROM_FILES:
            query = _query(table, StoreFiles(files={}, rewritten=frozenset()), root=self._state.trajectories)
            self._database.execute(f"CREATE TABLE {table} AS {query} LIMIT 0")

    def close(self) -> None:
        self._database.close()

    def refresh(self, *, at_once: bool = False) -> None:
        """Read new files, at most once a second unless `at_once`.

        Raises:
            StoreError: the store cannot be read, and has not been read before.
        """
        with self._lock:
            if not at_once and time.monotonic() - self._checked_at < CHECK_EVERY_S:
                return
            try:
                self._take_in()
                self.problem = ""
            except (PipelineError, duckdb.Error) as error:
                text = first_line(error) if isinstance(error, duckdb.Error) else str(error)
                if self.generation == 0:
                    raise StoreError(f"cannot read the store in {self._state.root}: {text}") from error
                self.problem = text
            self._checked_at = time.monotonic()

    def files_of(self, head: str) -> StoreFiles:
        """The files whose rows are in the index."""
        return self._files.get(head) or StoreFiles(files={}, rewritten=frozenset())

    @contextmanager
    def reading(self) -> Iterator["Reader"]:
        """All queries of one reader see the same moment. A query that still runs QUERY_LIMIT_S after the start of the
        reader is stopped.

        Raises:
            BadQuestionError: the queries took too long.
        """
        with self._database.cursor() as cursor:
            timer = threading.Timer(QUERY_LIMIT_S, cursor.interrupt)
            timer.daemon = True
            timer.start()
            try:
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                yield Reader(cursor)
                cursor.execute("COMMIT")
            except duckdb.InterruptException as error:
                raise BadQuestionError(
                    f"the queries of this page took over {QUERY_LIMIT_S:g} s: narrow the filter, or try again later"
                ) from error
            finally:
                timer.cancel()

    def keep(self, condition: str, values: Sequence[Any], id_tables: Sequence[pa.Table]) -> str:
        """Make a table with the rows of `facts` that match and whose episode_id is in each of `id_tables`; returns its
        name."""
        name = f"found_{next(self._numbers)}"
        with self._database.cursor() as cursor:
            terms = [condition]
            for number, ids in enumerate(id_tables):
                cursor.register(f"ids_{number}", ids)
                terms.append(f"episode_id IN (SELECT episode_id FROM ids_{number})")  # noqa: S608 - our own names
            cursor.execute(f"CREATE TABLE {name} AS SELECT * FROM facts WHERE {' AND '.join(terms)}", list(values))  # noqa: S608
        return name

    def drop(self, name: str) -> None:
        with self._database.cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")

    def _take_in(self) -> None:
        found = {head: list_files(self._state, head) for head in ("episodes", "rollout_groups")}
        paths = table_paths(self._state)
        owned = {name: _stamp(paths[name]) for name in OWNED}
        owned |= {str(path): (0, *stamp) for path, stamp in own_suite_files(self._state)}
        if found == self._files and owned == self._owned:
            return
        with self._database.cursor() as cursor:
            cursor.execute("BEGIN TRANSACTION")
            try:
                if owned != self._owned:
                    self._take_names(cursor, paths)
                for head, files in found.items():
                    self._take_files(cursor, head, files)
                if owned != self._owned:
                    for statement in (*NAMES_OF_TASKS, *NAMES_OF_CHECKPOINTS):
                        cursor.execute(statement)
                cursor.execute("COMMIT")
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
        self._files, self._owned = found, owned
        self.generation += 1

    def _take_files(self, cursor: duckdb.DuckDBPyConnection, head: str, files: StoreFiles) -> None:
        known = self.files_of(head)
        tables = [table for table, (own_head, _) in FILES.items() if own_head == head]
        gone = [key for key in known.files if key not in files.files]
        new = {key: file for key, file in files.files.items() if key not in known.files}
        for table in tables:
            if gone:
                cursor.execute(f"DELETE FROM {table} WHERE file IN (SELECT unnest({sql_list(gone)}))")  # noqa: S608
            if files.rewritten != known.rewritten:
                cursor.execute(
                    f"DELETE FROM {table} WHERE is_compacted AND part IN "  # noqa: S608
                    f"(SELECT unnest({sql_list(sorted(files.rewritten))}))"
                )
        if not new:
            return
        added = StoreFiles(files=new, rewritten=files.rewritten)
        for table in tables:
            query = _query(table, added, root=self._state.trajectories.resolve())
            cursor.execute(f"INSERT INTO {table} BY NAME {query}")

    def _take_names(self, cursor: duckdb.DuckDBPyConnection, paths: Mapping[str, Path]) -> None:
        """Read the columns of the small tables that a list shows, and the tasks of the user's own suites; a missing
        table is empty."""
        for name, key, columns in (
            ("union_tasks", "task_id, domain", ["task_id", "domain", "instruction"]),
            (
                "checkpoints",
                "checkpoint_id",
                ["checkpoint_id", "stage", "parent_id", "path", "num_updates", "run_ids"],
            ),
        ):
            path = paths[name]
            cursor.execute(f"DELETE FROM {name}")  # noqa: S608 - our own names
            if path.is_file():
                present = [column for column in columns if column in pq.read_schema(path).names]
                cursor.register("incoming", pq.read_table(path, columns=present))
                cursor.execute(f"INSERT INTO {name} BY NAME SELECT DISTINCT ON ({key}) * FROM incoming")  # noqa: S608
                cursor.unregister("incoming")
        own = {task.task_id: task for suite in own_suites(self._state) for task in suite.tasks}
        if own:
            names = [(one.task_id, one.domain, one.instruction) for one in own.values()]
            cursor.executemany(
                "INSERT INTO union_tasks SELECT $1, $2, $3, true WHERE $1 NOT IN (SELECT task_id FROM union_tasks)",
                names,
            )


class Reader:
    """Queries that see the same snapshot of the index."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return self._cursor.execute(sql, values or None).fetchall()

    def dicts(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        cursor = self._cursor.execute(sql, values or None)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def one(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> dict[str, Any] | None:
        return next(iter(self.dicts(sql, values)), None)


def _query(table: str, files: StoreFiles, *, root: Path) -> str:
    """The rows of a table of the index from these files."""
    head, detail = FILES[table]
    return FROM_FILES[table].format(
        heads=_scan(head, files.heads(is_compacted=True), files.heads(is_compacted=False)),
        details=_scan(detail, files.details(detail, is_compacted=True), files.details(detail, is_compacted=False)),
        hidden=sql_list(sorted(files.rewritten)),
        keys=sql_list(f"{file.details[detail]}\t{key}" for key, file in files.files.items()),
        root=str(root),
    )


def _scan(table: str, compacted: Sequence[str], small: Sequence[str]) -> str:
    """All stored columns, with NULL for columns that older files lack; `path` is the file, `is_compacted` its kind."""
    parts = [f"SELECT *, '' AS path, false AS is_compacted FROM no_{table}"]  # noqa: S608 - our own names and paths
    for paths, is_compacted in ((compacted, "true"), (small, "false")):
        if paths:
            scan = f"read_parquet({sql_list(paths)}, union_by_name = true, filename = true)"
            parts.append(f"SELECT *, filename AS path, {is_compacted} AS is_compacted FROM {scan}")  # noqa: S608
    return "(" + " UNION ALL BY NAME ".join(parts) + ")"


def _stamp(path: Any) -> tuple[int, int, int]:
    """Identifies the version of a small table's file, which is replaced as a whole."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
