"""Merges small parts in the programs that write them. Each finished episode is written as its own part, so that a kill
loses no stored data; a writer that finds many small parts merges them into one file."""

import logging
import threading
from pathlib import Path

from osworld_pipeline.errors import StoreBusyError, StoreError
from osworld_pipeline.object_store.note import read_note
from osworld_pipeline.store.compaction import CompactionSummary, compact_parts
from osworld_pipeline.store.part_files import Manifest, PartFile, list_names

log = logging.getLogger(__name__)
MERGE_PARTS = 32
"""Number of small parts of a table that triggers a merge while a program runs. They cost a query of all columns
about 8 ms."""
LEFT_PARTS = 8
"""At the end of a program fewer than this are not merged."""
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
        """By head table, the number of small parts that triggers a merge; higher after a merge that left some."""
        self._unlooked: dict[str, int] = {}
        """By head table, the number of this writer's parts before it counts again: a listing for every part would make
        the cost of an episode grow with the store."""
        self._in_use = threading.Lock()

    def written(self, head: str) -> None:
        """Merges the small parts if there are many and no other process does; the written part is safe."""
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

    def _num_small(self, head: str) -> int:
        try:
            return num_small_parts(self._root, head)
        except StoreError:
            return 0  # readers raise this error; a writer must not fail


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
        note = read_note(root.parent)
        if note is not None and note.role == "cache":
            return None
        return compact_parts(root, min_parts=min_parts, budget_bytes=budget_bytes, timeout_s=0)
    except StoreBusyError:
        return None
    except StoreError as error:
        log.warning("the small parts in %s are not merged: %s", root, error)
        return None
