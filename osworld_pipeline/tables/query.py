"""Questions in SQL over the catalog, read-only; whatever goes wrong is one sentence."""

import re
from typing import Any, NamedTuple

import duckdb

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line

_HOLDER = re.compile(r"held in (?P<program>.+?) \(PID (?P<pid>\d+)\)")


class QueryResult(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]


def run_query(state: StateDir, sql: str) -> QueryResult:
    """Runs `sql` in a connection of its own that cannot write.

    Raises:
        TableError: no catalog yet, a lock that names its holder, or bad SQL with DuckDB's first line.
    """
    if not state.catalog.is_file():
        raise TableError(
            f"there is no catalog at {state.catalog} yet: run `make demo` (or `osworld-pipeline demo`) first, "
            "or name another state folder with --state"
        )
    try:
        connection = duckdb.connect(str(state.catalog), read_only=True)
    except duckdb.Error as error:
        raise TableError(_explain_open(state, error)) from error
    with connection:
        try:
            cursor = connection.execute(sql)
            columns = [column[0] for column in cursor.description or ()]
            return QueryResult(columns, cursor.fetchall() if columns else [])
        except duckdb.Error as error:
            raise TableError(f"DuckDB refused the query: {first_line(error)}") from error


def _explain_open(state: StateDir, error: duckdb.Error) -> str:
    text = str(error)
    if "lock" in text.lower():
        match = _HOLDER.search(text)
        holder = f"process {match['pid']} ({match['program']})" if match else "another process"
        return (
            f"{state.catalog} is open for writing in {holder}: close it there (or stop that process), "
            "or open it read-only in both"
        )
    return f"cannot open {state.catalog}: {first_line(error)}; materialize the catalog again to rebuild it"
