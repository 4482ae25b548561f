"""The catalog: a DuckDB file with the small tables and views over the trajectory parts, for people and their queries.

It is always built as a new file and swapped in. So a reader never waits for a writer, a killed build leaves the old
catalog, and a part written after the build shows at once through its view.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import locked, remove_stale_temps, replacing, write_parquet
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.owned import read_table

LOCK_TIMEOUT_S = 120.0
KEYS = {"union_tasks": "task_id", "train_tasks": "task_id", "replay_buffer": "row_id", "checkpoints": "checkpoint_id"}
DETAILS = {"steps": ("episodes", "episode_id"), "injections": ("rollout_groups", "group_id")}
"""Rows of a detail table count only where the committed part of their head table names the same digest."""

_TASKS = """
CREATE VIEW tasks AS
SELECT *, task_id IN (SELECT task_id FROM train_tasks) AS is_train FROM union_tasks
"""
_REPLAY = "CREATE VIEW replay AS SELECT * FROM replay_buffer"
# A fault has no success and no reward (NULL), so that an average over `success` has the right denominator.
# Task ids of a built-in suite read <suite>-<family>-<number>; other tasks are told apart by their domain.
_EVALS = """
CREATE VIEW evals AS
SELECT
    e.checkpoint_id, c.stage, e.task_id, e.seed,
    coalesce(nullif(regexp_extract(e.task_id, '-([a-z0-9_]+)-[0-9]+$', 1), ''), nullif(t.domain, ''), 'unknown')
        AS family,
    coalesce(nullif(regexp_extract(e.task_id, '^(.+)-[a-z0-9_]+-[0-9]+$', 1), ''), 'osworld') AS suite,
    t.domain, t.instruction, e.outcome,
    CASE WHEN e.is_valid THEN e.task_reward END AS reward,
    CASE WHEN e.is_valid THEN e.is_success END AS success,
    e.is_valid, CASE WHEN e.is_valid THEN e.shaped_reward END AS shaped_reward,
    e.num_steps AS turns, e.max_turns, e.attempt, e.episode_id, e.stage_key, e.engine, e.temperature,
    e.provider, e.image_digest, e.grader_version, e.error, e.started_at
FROM episodes e
LEFT JOIN union_tasks t ON t.task_id = e.task_id
LEFT JOIN checkpoints c ON c.checkpoint_id = e.checkpoint_id
WHERE e.purpose = 'evaluate'
QUALIFY row_number() OVER (
    PARTITION BY e.checkpoint_id, e.task_id, e.seed ORDER BY e.started_at DESC, e.attempt DESC, e.episode_id DESC
) = 1
"""


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
    """The same tables and views in memory, as of now: for code of ours that must not depend on the last rebuild.

    Raises:
        TableError: as rebuild_catalog.
    """
    with duckdb.connect(":memory:") as connection:
        try:
            _define(connection, state)
            yield connection
        except duckdb.Error as error:
            raise TableError(f"cannot read the tables in {state.root}: {first_line(error)}") from error


def first_line(error: duckdb.Error) -> str:
    return str(error).strip().splitlines()[0]


def _define(connection: duckdb.DuckDBPyConnection, state: StateDir) -> None:
    connection.execute(f"SET threads = {min(4, os.cpu_count() or 1)}")
    for name, schema in OWNED_TABLES.items():
        connection.register("incoming", read_table(state, name))
        columns = ", ".join(
            "task_config::JSON AS task_config" if column == "task_config" else f'"{column}"' for column in schema.names
        )
        connection.execute(f"CREATE TABLE {name} AS SELECT {columns} FROM incoming")  # noqa: S608 - our own names
        connection.unregister("incoming")
        if name in KEYS:
            connection.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({KEYS[name]})")
    for name, schema in PART_TABLES.items():
        _seed(state, name)
        columns = ", ".join(f'p."{column}"' for column in schema.names)
        join = ""
        if name in DETAILS:
            head, key = DETAILS[name]
            join = f" SEMI JOIN {_scan(state, head)} h ON p.{key} = h.{key} AND p.part_digest = h.part_digest"
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM {_scan(state, name)} p{join}")  # noqa: S608
    for view in (_TASKS, _REPLAY, _EVALS):
        connection.execute(view)


def _scan(state: StateDir, table: str) -> str:
    pattern = str((state.trajectories / table).resolve() / "*.parquet").replace("'", "''")
    return f"read_parquet('{pattern}', union_by_name = true)"


def _seed(state: StateDir, table: str) -> None:
    """A part without rows: an empty glob is an error, and missing columns of older parts become NULL beside it."""
    path = state.trajectories / table / "_seed.parquet"
    schema = PART_TABLES[table]
    if not path.is_file() or _columns_of(path) != schema.names:
        write_parquet(path, schema.empty_table())


def _columns_of(path: Path) -> list[str]:
    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return []
