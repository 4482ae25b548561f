"""Replay rows from the tables: the demonstrations that may be trained on, selected ones by id, and how many tasks they
cover. Messages are read a few rows at a time, so memory holds the requested rows, not the table."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import REPLAY_BUFFER, conform
from osworld_pipeline.domain.replay import ReplayRow, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.tables.catalog import explained
from osworld_pipeline.tables.owned import table_path
from osworld_pipeline.tables.part_views import create_pinned_views

SUCCESS_THRESHOLD = 0.5
TABLE = "replay_buffer"
BATCH_ROWS = 256
"""Rows whose messages are in memory at once while the table is read."""
COLUMN_BATCH_ROWS = 8192
_ROW_COLUMNS = (
    *("row_id", "task_id", "original_task_id", "source_dataset", "reward", "messages", "dialect", "images"),
    *("source_path", "source_line", "source_sha256", "licence"),
)


@dataclass(frozen=True, kw_only=True)
class ReplayCoverage:
    """Which tasks have no usable demonstration: none of their exact id, and none of a chunk of their base id."""

    num_tasks: int
    """All tasks, with or without a demonstration."""
    missing: tuple[str, ...]
    """Tasks for which no demonstration has a stored reward of at least the threshold."""
    unverified: tuple[str, ...]
    """Tasks for which no such demonstration also reached the threshold in a playback; includes all of `missing`."""

    @property
    def share(self) -> float:
        """0 for no tasks."""
        return (self.num_tasks - len(self.missing)) / self.num_tasks if self.num_tasks else 0.0

    @property
    def verified_share(self) -> float:
        """0 for no tasks."""
        return (self.num_tasks - len(self.unverified)) / self.num_tasks if self.num_tasks else 0.0


def load_replay_rows(
    state: StateDir, *, min_reward: float = SUCCESS_THRESHOLD, require_verified: bool = False
) -> list[ReplayRow]:
    """The successful demonstrations in the order of the table, read from its file without a lock.

    With `require_verified` only those that reached `min_reward` when they were executed again.

    Raises:
        TableError: the replay buffer has not been built or is empty, or the tables cannot be read.
        StoreError: as part_views.
    """
    verified = verified_rewards(state)
    rows: list[ReplayRow] = []
    with _opened(state) as file:
        if file is None or file.metadata.num_rows == 0:
            raise TableError(f"the replay buffer in {state.tables} is empty: materialize replay_buffer first")
        for batch in file.iter_batches(BATCH_ROWS, columns=_known(file, _ROW_COLUMNS)):
            for row in batch.to_pylist():
                earned = verified.get(row["row_id"])
                if row["reward"] >= min_reward and (not require_verified or _reaches(earned, min_reward)):
                    rows.append(_replay_row(row, earned))
    return rows


def read_replay_rows(state: StateDir, row_ids: Collection[str]) -> dict[str, ReplayRow]:
    """The demonstrations of these ids that the table has, with their messages and without verified rewards.

    Raises:
        TableError: the table's file is damaged.
    """
    wanted, found = set(row_ids), dict[str, ReplayRow]()
    with _opened(state) as file:
        if file is None:
            return found
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["row_id"]).column("row_id").to_pylist()
            num_left = len(wanted.intersection(ids))
            batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=_known(file, _ROW_COLUMNS))
            while num_left:
                batch = next(batches)
                for index, row_id in enumerate(batch.column("row_id").to_pylist()):
                    if row_id in wanted:
                        (row,) = batch.slice(index, 1).to_pylist()
                        found[row_id] = _replay_row(row, None)
                        num_left -= 1
    return found


def read_replay_columns(state: StateDir, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The given columns of the replay buffer, in batches of thousands of rows; no batch without a table.

    Raises:
        TableError: the table's file is damaged.
    """
    schema = replay_schema(names)
    with _opened(state) as file:
        if file is not None:
            for batch in file.iter_batches(COLUMN_BATCH_ROWS, columns=_known(file, names)):
                yield from conform(pa.Table.from_batches([batch]), schema).to_batches()


def replay_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of these columns of the replay buffer."""
    return pa.schema([REPLAY_BUFFER.field(name) for name in names])


def verified_rewards(state: StateDir) -> dict[str, float]:
    """The verified rewards of demonstrations by row id: the highest score of a grader. A demonstration with only
    faults is absent.

    Raises:
        TableError: the tables cannot be read.
        StoreError: as part_views.
    """
    if not (state.trajectories / "replay_verifications").is_dir():
        return {}
    sql = "SELECT row_id, max(reward) FROM replay_verifications WHERE outcome IN ('success', 'failure') GROUP BY row_id"
    with part_views(state, "replay_verifications") as views:
        earned = {row_id: reward for row_id, reward in views.execute(sql).fetchall() if reward is not None}
    for former, row_ids in former_row_ids(state).items() if earned else ():
        for row_id in row_ids if former in earned else ():
            earned[row_id] = max(earned[former], earned.get(row_id, earned[former]))
    return earned


def former_row_ids(state: StateDir) -> dict[str, list[str]]:
    """Maps ids from before schema version 6 to the current row ids.

    Raises:
        TableError: the table's file is damaged.
    """
    found: dict[str, list[str]] = {}
    for batch in read_replay_columns(state, ("row_id", "former_row_id")):
        for row in batch.to_pylist():
            if row["former_row_id"] is not None and row["former_row_id"] != row["row_id"]:
                found.setdefault(row["former_row_id"], []).append(row["row_id"])
    return found


def replay_coverage(state: StateDir, task_ids: Sequence[str], section: ReplaySection) -> ReplayCoverage:
    """The coverage of these tasks, both with and without verification.

    Raises:
        TableError: the tables cannot be read.
        StoreError: as part_views.
    """
    verified = verified_rewards(state)
    known, proven = _Ids(set(), set()), _Ids(set(), set())
    for batch in read_replay_columns(state, ("row_id", "task_id", "original_task_id", "reward")):
        for row in batch.to_pylist():
            if row["reward"] >= section.threshold:
                known.add(row)
                if _reaches(verified.get(row["row_id"]), section.threshold):
                    proven.add(row)
    return ReplayCoverage(
        num_tasks=len(task_ids),
        missing=tuple(task_id for task_id in task_ids if not known.covers(task_id)),
        unverified=tuple(task_id for task_id in task_ids if not proven.covers(task_id)),
    )


class _Ids(NamedTuple):
    exact: set[str]
    base: set[str]

    def add(self, row: Mapping[str, Any]) -> None:
        self.exact.add(row["original_task_id"])
        self.base.add(row["task_id"])

    def covers(self, task_id: str) -> bool:
        return task_id in self.exact or base_task_id(task_id) in self.base


@contextmanager
def part_views(state: StateDir, *names: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """The current views over the trajectory parts, without the small tables, which may be large. `names`: the views
    that the block reads; without names there are all.

    Raises:
        TableError: a part cannot be read, or a query is refused.
        StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
    """
    with duckdb.connect(":memory:") as connection, parts_explained(state):
        create_pinned_views(connection, state, *names)
        yield connection


def parts_explained(state: StateDir) -> AbstractContextManager[None]:
    """DuckDB's errors about the trajectory parts, as a TableError."""
    return explained(f"the trajectories in {state.trajectories}")


@contextmanager
def _opened(state: StateDir) -> Iterator[pq.ParquetFile | None]:
    path = table_path(state, TABLE)
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        yield None
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged ({error}): remove it and materialize {TABLE} again") from error


def _known(file: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """The columns that the file has: an older one lacks some."""
    return [name for name in names if name in file.schema_arrow.names]


def _reaches(reward: float | None, threshold: float) -> bool:
    return reward is not None and reward >= threshold


def _replay_row(row: Mapping[str, Any], verified_reward: float | None) -> ReplayRow:
    return ReplayRow(
        row_id=row["row_id"],
        task_id=row["task_id"],
        original_task_id=row["original_task_id"],
        source_dataset=row["source_dataset"],
        reward=row["reward"],
        messages=tuple(
            {"role": message["role"], "content": [_part(part) for part in message["content"]]}
            for message in row["messages"]
        ),
        dialect=row["dialect"] or "slime",
        image_sha256s=tuple(row["images"]),
        verified_reward=verified_reward,
        source_path=row.get("source_path"),
        source_line=row.get("source_line"),
        source_sha256=row.get("source_sha256"),
        licence=row.get("licence"),
    )


def _part(part: Mapping[str, Any]) -> dict[str, str]:
    return {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}
