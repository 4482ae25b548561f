"""Lists duplicate records in the row of the first one. They are known only when all sources are read, so the replay
table is rewritten, one row group at a time."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import REPLAY_BUFFER

Duplicate = Mapping[str, Any]
"""Its place and its recorded reward: source_dataset, source_path, source_line, reward."""


def list_duplicates(file: IO[bytes], duplicates: Mapping[str, Sequence[Duplicate]]) -> None:
    """Adds the duplicates by row id to the replay table in `file`, a named file as just written. A row with an assumed
    reward gets the first recorded reward of its duplicates."""
    if not duplicates:
        return
    file.flush()
    with tempfile.TemporaryFile(dir=Path(file.name).parent) as listed:
        with pq.ParquetFile(file.name) as table, pq.ParquetWriter(listed, REPLAY_BUFFER, compression="zstd") as writer:
            for group in range(table.num_row_groups):
                rows = _with_duplicates(table.read_row_group(group), duplicates)
                writer.write_table(rows, row_group_size=max(rows.num_rows, 1))
        listed.seek(0)
        file.seek(0)
        file.truncate()
        shutil.copyfileobj(listed, file)


def _with_duplicates(rows: pa.Table, duplicates: Mapping[str, Sequence[Duplicate]]) -> pa.Table:
    columns = rows.select(["row_id", "reward", "is_reward_assumed"]).to_pylist()
    for row in columns:
        row["duplicates"] = list(duplicates.get(row["row_id"], ()))
        recorded = [one["reward"] for one in row["duplicates"] if one["reward"] is not None]
        if row["is_reward_assumed"] and recorded:
            row["reward"], row["is_reward_assumed"] = recorded[0], False
    for name in ("reward", "is_reward_assumed", "duplicates"):
        field = REPLAY_BUFFER.field(name)
        values = pa.array([row[name] for row in columns], field.type)
        rows = rows.set_column(rows.schema.get_field_index(name), field, values)
    return rows
