"""Rewrites parts of older schema versions, whose data is in other columns (OLDEST_READ in columns/), so that readers
know one shape. Concurrent readers see the rows before or after it; after a kill, the next call does the rest."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import remove_stale_temps
from osworld_pipeline.columns import OLDEST_READ, schema_version
from osworld_pipeline.errors import StoreError
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.compaction import exclusive, rewrite_parts
from osworld_pipeline.store.compaction_plan import Unit
from osworld_pipeline.store.format_note import FORMAT, read_format, write_format
from osworld_pipeline.store.old_tokens import add_sequences, old_heads
from osworld_pipeline.store.part_files import COMPACTED, DETAILS_OF, INCOMING, has_parts, take_snapshot

UNKNOWN = "unknown"
"""The value for a schema version that is not a number."""


@dataclass(frozen=True, kw_only=True)
class PartsPlan:
    """The formats of a state's parts, and what a migration changes."""

    format: int
    """The recorded format of the state; 1 for parts without a record, the present format if there are no parts."""
    versions: Mapping[str, Mapping[str, int]]
    """The number of live files, by head table and schema version."""
    num_old: int
    """Files of heads that are rewritten."""
    num_without_sequences: int
    """Those of them whose token lists are moved to files of `sequences`."""

    @property
    def is_due(self) -> bool:
        return self.format < FORMAT or bool(self.num_old)


def plan_parts(root: Path, on_progress: OnProgress | None = None) -> PartsPlan:
    """Changes nothing. Raises StoreError: a file is damaged, or the state has a newer format."""
    number = read_format(root).format if has_parts(root) else FORMAT
    versions: dict[str, Mapping[str, int]] = {}
    num_old = 0
    for head in DETAILS_OF:
        heads = tracked(_heads(root, head), on_progress, f"reading the formats of {head}", "files")
        found = Counter(map(_version, heads))
        num_old += sum(count for version, count in found.items() if _needs_rewriting(version))
        versions[head] = {UNKNOWN if version is None else str(version): count for version, count in found.items()}
    return PartsPlan(format=number, versions=versions, num_old=num_old, num_without_sequences=len(old_heads(root)))


def migrate_parts(root: Path, on_progress: OnProgress | None = None) -> PartsPlan:
    """Rewrites what is old and records the format. Returns what was found before.

    Raises:
        StoreBusyError: other upkeep of the trajectories runs.
        StoreError: a file is damaged, the state has a newer format, or the file system refused.
    """
    with exclusive(root):
        plan = plan_parts(root, on_progress)
        if plan.is_due:
            remove_stale_temps(root / INCOMING)
            add_sequences(root, on_progress)
            rewrite_parts(root, _is_old, on_progress)
            write_format(root)  # last: it says that nothing old is left
        return plan


def _heads(root: Path, head: str) -> list[Path]:
    files = take_snapshot(root, head)
    return [
        *(root / head / COMPACTED / name for name in files.compacted),
        *(root / head / file.name for file in files.small),
    ]


def _is_old(unit: Unit) -> bool:
    return _needs_rewriting(_version(unit.head))


def _needs_rewriting(version: int | None) -> bool:
    return version is not None and version < OLDEST_READ


def _version(path: Path) -> int | None:
    """The schema version of a file; None if it is not a number."""
    try:
        return schema_version(pq.read_metadata(path).metadata)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it and run its stage again") from error
