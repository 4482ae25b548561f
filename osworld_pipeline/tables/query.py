"""Read-only SQL queries over the catalog; every error says what to do."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import duckdb
import pyarrow as pa

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line, openable
from osworld_pipeline.tables.part_views import pin_snapshot
from osworld_pipeline.tables.slow_query import slow_reasons
from osworld_pipeline.tables.views import DERIVED

T = TypeVar("T")
TIMEOUT_S = 60.0
EXPLAIN_S = 10.0
"""Limit for planning a slow query."""
_HOLDER = re.compile(r"held in (?P<program>.+?) \(PID (?P<pid>\d+)\)")
_MISSING = re.compile(r"Table with name (?P<name>\w+) does not exist")
_EXPLAIN = re.compile(r"\s*EXPLAIN(\s+ANALYZE|\s*\([^)]*\))?", re.IGNORECASE)


class QueryResult(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]


def run_query(state: StateDir, sql: str, *, timeout_s: float = TIMEOUT_S) -> QueryResult:
    """Runs `sql` in a separate connection, which sees one snapshot of the parts, cannot write, and reads only the
    catalog and the parts.

    Raises:
        TableError: no catalog yet, a lock (with its holder), bad SQL (with DuckDB's full message), or a query that took
            longer than `timeout_s` (with reasons).
        StoreError: as open_catalog.
    """

    def fetch(connection: duckdb.DuckDBPyConnection) -> QueryResult:
        cursor = connection.execute(sql)
        columns = [column[0] for column in cursor.description or ()]
        return QueryResult(columns, cursor.fetchall() if columns else [])

    return _ask(state, sql, timeout_s, fetch)


def query_arrow(state: StateDir, sql: str, *, timeout_s: float = TIMEOUT_S) -> pa.Table:
    """Does the same as run_query, with DuckDB's own types."""
    return _ask(state, sql, timeout_s, lambda connection: connection.sql(sql).to_arrow_table())


def _ask(state: StateDir, sql: str, timeout_s: float, fetch: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    with open_catalog(state) as connection:
        try:
            _need_question(connection, sql)
            return fetch_within(connection, fetch, timeout_s)
        except TimeoutError as error:
            reasons = "; ".join(_reasons(state, connection, sql)) or "query less data"
            raise TableError(
                f"the query was stopped after {timeout_s:g} s: {reasons}; or raise the limit with --timeout-s"
            ) from error
        except duckdb.Error as error:
            raise TableError(_explain_refusal(state, error)) from error


def explain_slow(state: StateDir, sql: str) -> list[str]:
    """Why the query is slow, and what to query instead, one sentence each. If its plan shows no reason, one sentence
    says how to investigate; empty if the query cannot be planned within EXPLAIN_S.

    Raises:
        TableError, StoreError: as open_catalog.
    """
    with open_catalog(state) as connection:
        return _reasons(state, connection, sql)


def _explain_refusal(state: StateDir, error: duckdb.Error) -> str:
    missing = _MISSING.search(str(error))
    if missing and missing["name"].lower() in {*PART_TABLES, *OWNED_TABLES, *DERIVED}:
        return (
            f"the catalog has no `{missing['name']}` yet, because an older version built it: run "
            f"{pipeline_line(state, 'rebuild-catalog')}"
        )
    return f"DuckDB refused the query: {str(error).strip()}"


def _reasons(state: StateDir, connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    compact = pipeline_line(state, "compact")
    try:
        return fetch_within(connection, lambda asked: slow_reasons(asked, sql, compact=compact), EXPLAIN_S)
    except (duckdb.Error, TimeoutError):  # an explanation must not fail the query
        return []


def fetch_within(
    connection: duckdb.DuckDBPyConnection, fetch: Callable[[duckdb.DuckDBPyConnection], T], limit_s: float
) -> T:
    """Runs DuckDB in a separate thread, so that this one handles SIGINT and the timeout.

    Raises:
        TimeoutError: it was stopped.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="query") as pool:
        asked = pool.submit(fetch, connection)
        try:
            return asked.result(limit_s)
        except BaseException:
            while not asked.done():  # an interrupt before the query has started is lost
                connection.interrupt()
                wait([asked], timeout=0.05)
            raise


@contextmanager
def open_catalog(state: StateDir) -> Iterator[duckdb.DuckDBPyConnection]:
    """The catalog, read-only, with its views pinned to the current parts and without access to other files.

    Raises:
        TableError: there is none yet, it cannot be opened, or another process has it open for writing.
        StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
    """
    if not state.catalog.is_file():
        raise TableError(
            f"there is no catalog at {state.catalog} yet: run {pipeline_line(state, 'demo')} first, or name another "
            "state folder with --state"
        )
    with ExitStack() as stack:
        try:
            database = stack.enter_context(openable(state.catalog))
            connection = stack.enter_context(duckdb.connect(str(database), read_only=True))
        except duckdb.Error as error:
            raise TableError(_explain_open(state, error)) from error
        folder = str(state.trajectories.resolve()).replace("'", "''")
        pin_snapshot(connection, state)
        for setting in (
            f"allowed_directories = ['{folder}']",
            "enable_progress_bar = false",  # it would be printed to standard output
            "parquet_metadata_cache = true",  # parts do not change
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        yield connection


def _need_question(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Accepts one SELECT (or an equivalent), or its plan: COPY could write files next to the parts even in a read-only
    connection."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise TableError(f"a query is one statement, not {len(statements)}")
    (statement,) = statements
    if statement.type == duckdb.StatementType.EXPLAIN:
        _need_question(connection, _EXPLAIN.sub("", statement.query, count=1))
    elif statement.type != duckdb.StatementType.SELECT:
        raise TableError(f"queries are read-only: {statement.type.name} is refused, use SELECT")


def _explain_open(state: StateDir, error: duckdb.Error) -> str:
    text = str(error)
    if "lock" in text.lower():
        match = _HOLDER.search(text)
        holder = f"process {match['pid']} ({match['program']})" if match else "another process"
        return (
            f"{state.catalog} is open for writing in {holder}: close it there (or stop that process), "
            "or open it read-only in both"
        )
    return f"cannot open {state.catalog}: {first_line(error)}; {pipeline_line(state, 'rebuild-catalog')} rebuilds it"
