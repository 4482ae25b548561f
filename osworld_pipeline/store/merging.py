"""Small parts merged by the programs that write them. An episode is a part of its own from the moment it ends, so that
a kill loses nothing that was stored; the writer that finds many small parts makes one file of them."""

import logging
import threading
from pathlib import Path

from osworld_pipeline.errors import StoreBusyError, StoreError
from osworld_pipeline.object_store.note import read_note
from osworld_pipeline.store.compaction import CompactionSummary, compact_parts
from osworld_pipeline.store.part_files import Manifest, PartFile, list_names

log = logging.getLogger(__name__)
MERGE_PARTS = 64
"""Small parts of a table that are merged while a program runs: so many cost a query some milliseconds."""
LEFT_PARTS = 8
"""At the end of a program fewer than this are left as they are."""
WRITER_BUDGET_BYTES = 32 << 20
"""Read of a table while a program runs: half a second's work or so, and 0.3 GB of memory."""
RUN_BUDGET_BYTES = 256 << 20
"""Read of a table at the end of a program, or by the schedule."""


class PartMerger:
    """Of one writer; any number of writers may have one."""

    def __init__(self, root: Path, *, merge_parts: int = MERGE_PARTS) -> None:
        self._root = root
        self._merge_parts = merge_parts
        self._due: dict[str, int] = {}
        """By head table: so many small parts are waited for. More after a merge that left some."""
        self._in_use = threading.Lock()

    def written(self, head: str) -> None:
        """Merges the small parts where there are many and no other process does; the part that was written is safe."""
        due = self._due.get(head, self._merge_parts)
        # Retired files are listed until they are deleted: the manifest is read only where they could make the number.
        if len(list_names(self._root / head)) <= due or self._num_small(head) < due:
            return
        if self._in_use.acquire(blocking=False):
            try:
                merge_parts(self._root, min_parts=self._merge_parts, budget_bytes=WRITER_BUDGET_BYTES)
                self._due[head] = self._num_small(head) + self._merge_parts
            finally:
                self._in_use.release()

    def _num_small(self, head: str) -> int:
        try:
            return num_small_parts(self._root, head)
        except StoreError:
            return 0  # readers raise this error; a writer must not fail by it


def num_small_parts(root: Path, head: str) -> int:
    """Files of parts that no compaction has taken in, replaced ones included. Raises StoreError."""
    retired = Manifest.read(root).retired
    return sum(f"{head}/{name}" not in retired for name in list_names(root / head) if PartFile.parse(name))


def merge_parts(
    root: Path, *, min_parts: int = LEFT_PARTS, budget_bytes: int = RUN_BUDGET_BYTES
) -> CompactionSummary | None:
    """A compaction of bounded work that never fails its caller: None where other upkeep runs, in a cache of an object
    store, or where the store cannot be compacted, which is logged."""
    try:
        note = read_note(root.parent)
        if note is not None and note.role == "cache":
            return None
        return compact_parts(root, min_parts=min_parts, budget_bytes=budget_bytes, timeout_s=0)
    except StoreBusyError:
        return None
    except StoreError as error:
        log.warning("the small parts in %s stay as they are: %s", root, error)
        return None
