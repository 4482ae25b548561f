"""The columns of every table, in Arrow's types, and the rows of records. Trajectory parts, small tables, the catalog
and its views use this definition, so that a column is defined once and old parts can be read together with new ones.

A field of a record becomes a column by its `Stored` (domain/). Computed columns are declared here, with their values.

`update` is 1 for the first update of a stage in every view. In the files of episodes, steps, rollout_groups and
injections it starts at 0; the views add 1 (tables/part_views.py)."""

from collections.abc import Mapping

import pyarrow as pa

from osworld_pipeline.columns.episodes import (
    EPISODES,
    SEQUENCES,
    STEPS,
    episode_from,
    episode_row,
    sequence_from,
    sequence_rows,
    step_rows,
)
from osworld_pipeline.columns.fields import (
    INT64,
    MESSAGES,
    NUMBERS,
    RUN_IDS,
    TEXT,
    TEXTS,
    TIME,
    column,
    doc_of,
    since,
    unit_of,
)
from osworld_pipeline.columns.groups import (
    INJECTIONS,
    REPLAY_VERIFICATIONS,
    ROLLOUT_GROUPS,
    group_row,
    injection_row,
    verification_row,
)
from osworld_pipeline.columns.owned import (
    CHECKPOINTS,
    RAW_COUNTS,
    REJECTS,
    REPLAY_BUFFER,
    UNION_TASKS,
    checkpoint_from,
    checkpoint_row,
)
from osworld_pipeline.columns.records import Row, utc_time
from osworld_pipeline.columns.stages import STAGE_ATTEMPTS, UPDATES, attempt_row, update_row
from osworld_pipeline.without_pandas import spare_pandas

spare_pandas()

__all__ = [
    "BOOKKEEPING", "CHECKPOINTS", "EPISODES", "INJECTIONS", "MESSAGES", "NUMBERS", "OLDEST_READ", "OWNED_TABLES",
    "PART_TABLES", "RAW_COUNTS", "REJECTS", "REPLAY_BUFFER", "REPLAY_VERIFICATIONS", "ROLLOUT_GROUPS", "RUN_IDS",
    "SCHEMA_KEY", "SCHEMA_VERSION", "SEQUENCES", "STAGE_ATTEMPTS", "STEPS", "TEXT", "TEXTS", "TIME", "UNION_TASKS",
    "UPDATES", "Row", "attempt_row", "checkpoint_from", "checkpoint_row", "conform", "doc_of", "episode_from",
    "episode_row", "group_row", "injection_row", "is_newer", "marked", "schema_version", "sequence_from",
    "sequence_rows", "step_rows", "stored", "unit_of", "update_row", "utc_time", "verification_row",
]  # fmt: skip

SCHEMA_KEY = b"osworld_schema_version"
OLDEST_READ = 10
"""Parts of older versions have data in other columns; `osworld-pipeline migrate` rewrites them, and
readers refuse them (store/old_tokens.py)."""

PART_TABLES: Mapping[str, pa.Schema] = {
    "episodes": EPISODES,
    "steps": STEPS,
    "sequences": SEQUENCES,
    "rollout_groups": ROLLOUT_GROUPS,
    "injections": INJECTIONS,
    "replay_verifications": REPLAY_VERIFICATIONS,
    "updates": UPDATES,
    "stage_attempts": STAGE_ATTEMPTS,
}
"""Append-only, many writers: one folder of Parquet parts each."""

BOOKKEEPING = pa.schema(
    [
        column("part", TEXT, "The part that contains the row."),
        column(
            "part_version", INT64, "Orders the versions of a part: milliseconds << 20, plus the compaction's number."
        ),
        column("part_digest", TEXT, "Not used; NULL."),
    ]
)
"""Columns in the files, after a table's own columns; views do not show them."""

OWNED_TABLES: Mapping[str, pa.Schema] = {
    "union_tasks": UNION_TASKS,
    "replay_buffer": REPLAY_BUFFER,
    "train_tasks": UNION_TASKS,
    "rejects": REJECTS,
    "raw_counts": RAW_COUNTS,
    "checkpoints": CHECKPOINTS,
}
"""Small, one owner: one Parquet file each."""

SCHEMA_VERSION = max(
    11, *(since(field) for schema in (*PART_TABLES.values(), *OWNED_TABLES.values()) for field in schema)
)
"""Version in the key-value metadata of every Parquet file we write: the highest `since` of a column. Columns are not
renamed, removed or narrowed, with one exception: version 10 moved the token lists from episodes to sequences
(OLDEST_READ). A file of an older version reads with NULL for missing columns. A file of a newer version reads without
unknown columns and is not compacted."""


def stored(table: str) -> pa.Schema:
    """The columns of a part's file: the table's own and the bookkeeping."""
    return pa.schema([*PART_TABLES[table], *BOOKKEEPING])


def marked(table: pa.Table) -> pa.Table:
    """`table` with the schema version as its only metadata: column docs are not repeated in every file."""
    plain = pa.schema([pa.field(field.name, field.type) for field in table.schema])
    marked_schema = plain.with_metadata({SCHEMA_KEY: str(SCHEMA_VERSION).encode()})
    return pa.Table.from_arrays(table.columns, schema=marked_schema)


def schema_version(metadata: Mapping[bytes, bytes] | None) -> int | None:
    """The schema version in a file's key-value metadata, 0 without one; None if it is not a number."""
    version = (metadata or {}).get(SCHEMA_KEY, b"0")
    return int(version) if version.isdigit() else None


def is_newer(metadata: Mapping[bytes, bytes] | None) -> bool:
    """Whether a file with this key-value metadata was written by a newer program than this one."""
    version = schema_version(metadata)
    return version is None or version > SCHEMA_VERSION


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns of `schema`: missing columns are null, unknown ones are dropped."""
    present = set(table.column_names)
    columns = [
        _of_type(table.column(field.name), field.type)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _of_type(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """A cast to the same type takes as long as one that changes something."""
    return column if column.type.equals(wanted) else column.cast(wanted)
