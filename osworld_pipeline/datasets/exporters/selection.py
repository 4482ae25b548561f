"""Selects the rows of an export, as SQL over the views, and reads them in batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from osworld_pipeline.columns import sequence_from
from osworld_pipeline.domain.episode import TokenSequence
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line, fresh_views

OnProgress = Callable[[int, int], None]
"""Called with the rows done and the total."""
EPISODES_A_BATCH = 256
STEP_COLUMNS = (
    "episode_id, step_index, screenshot_sha256, screenshot_format, observation_text, response_text, action, command, "
    "action_type, action_parsed, action_executed, action_error, fallback_used, policy_version, model_s, step_s"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Filters of an export; an empty or None filter excludes nothing, except empty `purposes`."""

    checkpoints: tuple[str, ...] = ()
    purposes: tuple[str, ...] = ()
    """Empty: all but superseded."""
    min_reward: float | None = None
    """Minimum of the raw task reward; excludes rows without one (faults)."""
    licences: tuple[str, ...] = ()
    """Case-insensitive; excludes rows of unknown licence."""
    where: str | None = None
    """A SQL condition over the relation's own columns."""

    def over(
        self, relation: str, *, reward: str, checkpoint: str | None = None, purpose: str | None = None,
        licence: str | None = None,
    ) -> str:  # fmt: skip
        """SQL for the chosen rows of `relation`. The other arguments name the column for each filter; None if the
        relation has no such column.

        Raises:
            TableError: `where` is not one SQL condition.
        """
        conditions = []
        if self.checkpoints and checkpoint:
            conditions.append(f"{checkpoint} IN ({_texts(self.checkpoints)})")
        if self.purposes and purpose:
            conditions.append(f"{purpose} IN ({_texts(self.purposes)})")
        elif purpose:
            conditions.append(f"{purpose} <> 'superseded'")
        if self.min_reward is not None:
            conditions.append(f"{reward} >= {float(self.min_reward)!r}")
        if self.licences and licence:
            conditions.append(f"lower({licence}) IN ({_texts([name.lower() for name in self.licences])})")
        if self.where:
            conditions.append(f"({_one_condition(self.where)}\n)")
        return f"SELECT * FROM {relation} WHERE {' AND '.join(conditions) or 'true'}"  # noqa: S608 - quoted above

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoints": list(self.checkpoints),
            "purposes": list(self.purposes),
            "min_reward": self.min_reward,
            "licences": list(self.licences),
            "where": self.where,
        }


@contextmanager
def export_views(state: StateDir) -> Iterator[duckdb.DuckDBPyConnection]:
    """A snapshot of the views for streams. It uses one thread, to limit the memory of DuckDB's buffers.

    Raises:
        TableError: no such state folder, a table cannot be read, or a filter is bad SQL.
        StoreError: as fresh_views.
    """
    if not state.root.is_dir():
        raise TableError(f"there is no state folder {state.root}: name another one with --state")
    with fresh_views(state) as connection:
        connection.execute("SET threads = 1")
        yield connection


def count(connection: duckdb.DuckDBPyConnection, sql: str, *, of: str) -> int:
    """The number of rows of `sql`, a selection `of` a view. Called before reading, so that a bad filter fails at once.

    Raises:
        TableError: a filter is bad SQL, or names no column of the view.
    """
    try:
        # Fetch all: a pending result would block the connection.
        return connection.execute(f"SELECT count(*) FROM ({sql})").fetchall()[0][0]  # noqa: S608 - our own SQL
    except duckdb.Error as error:
        raise TableError(f"DuckDB refused the filters over `{of}`: {first_line(error)}") from error


def stream(connection: duckdb.DuckDBPyConnection, sql: str, *, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Streams the rows of `sql` through a separate cursor, so the connection stays free. Raises TableError."""
    cursor = connection.cursor()
    try:
        _share_snapshot(connection, cursor)
        # DuckDB rounds a batch up to its vectors of 2,048 rows.
        for batch in cursor.sql(sql).to_arrow_reader(batch_rows):
            yield from (batch.slice(start, batch_rows) for start in range(0, batch.num_rows, batch_rows))
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"the tables could not be read to their end: {str(error).splitlines()[0]}") from error
    except duckdb.Error as error:
        raise TableError(f"the tables could not be read to their end: {first_line(error)}") from error
    finally:
        cursor.close()


def steps_of(connection: duckdb.DuckDBPyConnection, episode_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The steps of these episodes (at least one) in order; an episode without steps has an empty list."""
    return _details_of(connection, f"SELECT {STEP_COLUMNS} FROM steps", "step_index", episode_ids)  # noqa: S608


def sequences_of(connection: duckdb.DuckDBPyConnection, episode_ids: Sequence[str]) -> dict[str, list[TokenSequence]]:
    """The token sequences of these episodes (at least one) in order; an episode without tokens has an empty list."""
    rows = _details_of(connection, "SELECT * FROM sequences", "sequence_index", episode_ids)
    return {name: [sequence_from(row) for row in found] for name, found in rows.items()}


def _details_of(
    connection: duckdb.DuckDBPyConnection, select: str, order: str, episode_ids: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {episode_id: [] for episode_id in episode_ids}
    # The range lets DuckDB skip most files: a batch in the store's order has a narrow range of ids.
    cursor = connection.execute(
        f"{select} WHERE episode_id BETWEEN ? AND ? AND episode_id IN (SELECT unnest(?)) ORDER BY episode_id, {order}",
        [min(episode_ids), max(episode_ids), list(episode_ids)],
    )
    names = [column[0] for column in cursor.description or ()]
    for row in cursor.fetchall():
        found[row[0]].append(dict(zip(names, row, strict=True)))
    return found


def _share_snapshot(connection: duckdb.DuckDBPyConnection, cursor: duckdb.DuckDBPyConnection) -> None:
    """Copies the variables that name the files of the views: a cursor does not inherit them."""
    for (name,) in connection.execute("SELECT name FROM duckdb_variables()").fetchall():
        cursor.execute(f"SET VARIABLE {name} = ?", connection.execute(f"SELECT getvariable('{name}')").fetchall()[0])


def _texts(texts: Sequence[str]) -> str:
    return ", ".join("'" + text.replace("'", "''") + "'" for text in texts)


def _one_condition(where: str) -> str:
    """Checks that the condition is one expression and does not end our statement and start another one."""
    try:
        is_one = len(duckdb.extract_statements(f"SELECT 1 WHERE ({where}\n)")) == 1
    except duckdb.Error as error:
        raise TableError(f"--where is not an SQL condition: {first_line(error)}") from error
    if not is_one:
        raise TableError("--where holds more than one statement: give one condition, such as \"task_id LIKE 'os%'\"")
    return where
