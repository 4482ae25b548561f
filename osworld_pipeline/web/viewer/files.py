"""The valid files of the store at one moment, each with its details (decision 0010). Nothing is written.

A file is never changed, so data that was read from it stays valid as long as a snapshot names it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, take_snapshot


@dataclass(frozen=True, kw_only=True)
class HeadFile:
    key: str
    """The head's path below its table's folder; it identifies the file."""
    head: Path
    details: Mapping[str, Path]
    """Files of details by table."""
    is_compacted: bool


@dataclass(frozen=True, kw_only=True)
class StoreFiles:
    """Files of one head table."""

    files: Mapping[str, HeadFile]
    """Files by key."""
    rewritten: frozenset[str]
    """Parts whose rows in compacted files are no longer valid."""

    def heads(self, *, is_compacted: bool) -> list[str]:
        return [str(file.head) for file in self.files.values() if file.is_compacted == is_compacted]

    def details(self, table: str, *, is_compacted: bool) -> list[str]:
        return [str(file.details[table]) for file in self.files.values() if file.is_compacted == is_compacted]


def list_files(state: StateDir, head: str) -> StoreFiles:
    """The current files of `head`.

    Raises:
        StoreError: the compaction's manifest is damaged, lost, or older than the compacted files; or a part has no
            version in its name.
    """
    root = state.trajectories.resolve()
    snapshot = take_snapshot(root, head)
    keys = {f"{COMPACTED}/{name}": True for name in snapshot.compacted} | {file.name: False for file in snapshot.small}
    files = {
        key: HeadFile(
            key=key,
            head=root / head / key,
            details={table: root / table / key for table in DETAILS_OF[head]},
            is_compacted=is_compacted,
        )
        for key, is_compacted in keys.items()
    }
    return StoreFiles(files=files, rewritten=snapshot.rewritten)


def empty_rows(schema: pa.Schema) -> pa.RecordBatchReader:
    """No rows with these columns, for DuckDB."""
    return pa.RecordBatchReader.from_batches(schema, [])


def sql_list(values: Iterable[str]) -> str:
    """A list of text for DuckDB."""
    return "[" + ", ".join("'" + value.replace("'", "''") + "'" for value in values) + "]::VARCHAR[]"
