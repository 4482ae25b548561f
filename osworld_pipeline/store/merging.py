"""Limits the number of files of a table while programs write. Each finished episode is a part of its own, so that a
kill loses no stored data; parts that are written together are committed together, as one compacted file, and a writer
that finds many small files merges them."""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from osworld_pipeline.errors import StoreBusyError, StoreError
from osworld_pipeline.object_store.note import is_cache
from osworld_pipeline.store.compacted_files import write_rows
from osworld_pipeline.store.compaction import CompactionSummary, commit_manifest, compact_parts, exclusive
from osworld_pipeline.store.part_files import (
    COMPACTED,
    DETAILS_OF,
    HeadFiles,
    Manifest,
    PartFile,
    compacted_name,
    list_names,
    take_snapshot,
)
from osworld_pipeline.store.reading import read_part_table

log = logging.getLogger(__name__)
MERGE_PARTS = 32
"""Number of small parts of a table that triggers a merge while a program runs. They cost a query of all columns
about 8 ms."""
LEFT_PARTS = 8
"""Fewer small parts than this are not merged at the end of a program."""
WRITER_BUDGET_BYTES = 32 << 20
"""Bytes read of a table while a program runs: about half a second and 0.3 GB of memory."""
RUN_BUDGET_BYTES = 256 << 20
"""Bytes read of a table at the end of a program, or by the schedule."""


class PartMerger:
    """Merges for one writer; each writer may have its own."""

    def __init__(self, root: Path, *, merge_parts: int = MERGE_PARTS) -> None:
        self._root = root
        self._merge_parts = merge_parts
        self._due: dict[str, int] = {}
        """The number of small parts that triggers a merge, by head table; higher after a merge that left some."""
        self._unlooked: dict[str, int] = {}
        """How many more parts this writer may write before it lists the folder again, by head table: a listing for
        every part would make the cost of an episode grow with the store."""
        self._num_commits: dict[str, int] = {}
        """The number of group commits since a merge, by head table."""
        self._in_use = threading.Lock()

    def written(self, head: str) -> None:
        """Called after a part was written. Merges the small parts if there are many and no other process merges them;
        an error of the merge does not affect the written part."""
        self._unlooked[head] = self._unlooked.get(head, 0) - 1
        if self._unlooked[head] >= 0 or not self._in_use.acquire(blocking=False):
            return
        try:
            due = self._due.get(head, self._merge_parts)
            if (num_small := self._num_small(head)) >= due:
                merge_parts(self._root, min_parts=self._merge_parts, budget_bytes=WRITER_BUDGET_BYTES)
                num_small = self._num_small(head)
                due = self._due[head] = num_small + self._merge_parts
            self._unlooked[head] = due - num_small - 1
        finally:
            self._in_use.release()

    def committed(self, head: str) -> None:
        """Does the same as `written`, after a group commit: many small compacted files are merged like many small
        parts."""
        self._num_commits[head] = self._num_commits.get(head, 0) + 1
        if self._num_commits[head] < self._merge_parts or not self._in_use.acquire(blocking=False):
            return
        try:
            self._num_commits[head] = 0
            merge_parts(self._root, min_parts=self._merge_parts, budget_bytes=WRITER_BUDGET_BYTES)
        finally:
            self._in_use.release()

    def _num_small(self, head: str) -> int:
        try:
            return num_small_parts(self._root, head)
        except StoreError:
            return 0  # readers raise this error; a writer must not fail


class GroupCommit:
    """Commits new parts of one head table together, for one writer: hundreds of episodes that end in the same second
    cost about as much as one."""

    def __init__(self, root: Path, head: str) -> None:
        self._root = root
        self._head = head
        self._looked_in: set[str] = set()
        """Compacted files whose parts are in `_known`."""
        self._known: set[str] = set()

    def commit(self, parts: Collection[str], tables: Mapping[str, pa.Table]) -> bool:
        """Writes the rows of `parts`, by table, with one commit. False, without a change, if the caller has to write
        each part by itself: one of them is stored already, or other upkeep runs, or this state is the cache of an
        object store.

        After an error, which is logged, it returns False too: what the caller then writes replaces these rows.
        """
        try:
            if is_cache(self._root.parent):
                return False
            with exclusive(self._root, timeout_s=0):
                files = take_snapshot(self._root, self._head)
                if self._is_stored(parts, files):
                    return False
                self._write(files, tables)
                self._known.update(parts)
        except StoreBusyError:
            return False
        except StoreError as error:
            log.warning("%d parts in %s are not committed together: %s", len(parts), self._root, error)
            return False
        return True

    def _is_stored(self, parts: Collection[str], files: HeadFiles) -> bool:
        """Whether any of `parts` is stored already: if two compacted files had rows of one part, both would be live."""
        for name in files.compacted:
            if name not in self._looked_in:
                path = self._root / self._head / COMPACTED / name
                found = read_part_table(path, self._head, columns=["part"])
                self._known.update(found["part"].unique().to_pylist())
                self._looked_in.add(name)
        return not (self._known.isdisjoint(parts) and files.rewritten.isdisjoint(parts))

    def _write(self, files: HeadFiles, tables: Mapping[str, pa.Table]) -> None:
        """Writes in the order of a compaction: the generation, then the files, then the manifest that names them."""
        manifest = Manifest.read(self._root)
        begun = replace(manifest, generation=1 + manifest.generation)
        commit_manifest(self._root, begun)
        name = compacted_name(begun.generation)
        for table in (*DETAILS_OF[self._head], self._head):
            write_rows(self._root, table, name, tables[table])
        self._looked_in.add(name)
        commit_manifest(self._root, replace(begun, files={**begun.files, self._head: (*files.compacted, name)}))


def num_small_parts(root: Path, head: str) -> int:
    """Number of files of parts that are not compacted, including replaced ones. Raises StoreError."""
    retired = Manifest.read(root).retired
    return sum(f"{head}/{name}" not in retired for name in list_names(root / head) if PartFile.parse(name))


def merge_parts(
    root: Path, *, min_parts: int = LEFT_PARTS, budget_bytes: int = RUN_BUDGET_BYTES
) -> CompactionSummary | None:
    """A bounded compaction that does not raise: None if other upkeep runs, in a cache of an object store, or after an
    error, which is logged."""
    try:
        if is_cache(root.parent):
            return None
        return compact_parts(root, min_parts=min_parts, budget_bytes=budget_bytes, timeout_s=0)
    except StoreBusyError:
        return None
    except StoreError as error:
        log.warning("the small parts in %s are not merged: %s", root, error)
        return None
