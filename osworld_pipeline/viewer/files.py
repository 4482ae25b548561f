"""Which files of the store count at one moment, each with its details (decision 0010); nothing is ever written.

A file is never changed, so what has been read of it once stays true for as long as a snapshot names it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.part_files import COMPACTED, DETAIL_OF, PartFile, take_snapshot
from osworld_pipeline.store.reading import details_path, read_part_table


@dataclass(frozen=True, kw_only=True)
class HeadFile:
    key: str
    """The head's path below its table's folder: what tells files apart."""
    head: Path
    detail: Path | None
    is_compacted: bool


@dataclass(frozen=True, kw_only=True)
class StoreFiles:
    """Of one head table."""

    files: Mapping[str, HeadFile]
    """By key."""
    rewritten: frozenset[str]
    """Parts whose rows in compacted files do not count any more."""

    def heads(self, *, is_compacted: bool) -> list[str]:
        return [str(file.head) for file in self.files.values() if file.is_compacted == is_compacted]

    def details(self, *, is_compacted: bool) -> list[str]:
        found = (file.detail for file in self.files.values() if file.is_compacted == is_compacted)
        return [str(path) for path in found if path is not None]


def list_files(state: StateDir, head: str) -> StoreFiles:
    """The files of `head` as of now.

    Raises:
        StoreError: the compaction's manifest is damaged, or a file from before versions.
    """
    root, detail = state.trajectories.resolve(), DETAIL_OF[head]
    snapshot = take_snapshot(root, head)
    files: dict[str, HeadFile] = {}
    for name in snapshot.compacted:
        key = f"{COMPACTED}/{name}"
        below = root / detail / COMPACTED / name if detail else None
        files[key] = HeadFile(key=key, head=root / head / key, detail=below, is_compacted=True)
    for file in snapshot.small:
        below = _details_of(root, head, file)
        files[file.name] = HeadFile(key=file.name, head=root / head / file.name, detail=below, is_compacted=False)
    return StoreFiles(files=files, rewritten=snapshot.rewritten)


def _details_of(root: Path, head: str, file: PartFile) -> Path | None:
    detail = DETAIL_OF[head]
    if detail is None:
        return None
    return root / detail / file.name if file.version else _old_details(root, head, file)


@lru_cache(maxsize=4096)
def _old_details(root: Path, head: str, file: PartFile) -> Path | None:
    """Of a head from before versions, whose rows name their details' digest."""
    return details_path(root, head, file, read_part_table(root / head / file.name, head, columns=["part_digest"]))


def empty_rows(schema: pa.Schema) -> pa.RecordBatchReader:
    """No rows of these columns, for DuckDB. An empty Arrow table would be made of lists, and for the first list that
    Arrow is given it imports pandas, which takes a second or more."""
    return pa.RecordBatchReader.from_batches(schema, [])


def sql_list(values: Iterable[str]) -> str:
    """A list of text for DuckDB."""
    return "[" + ", ".join("'" + value.replace("'", "''") + "'" for value in values) + "]::VARCHAR[]"
