"""Compaction: merges many small parts into few large files, sorted by id, concurrently with writers and readers.

A manifest with the next generation is committed first, then new files are written with it in their names; the second
commit of the manifest names them and retires what they replace. A retired file is kept for a grace period, for queries
that have listed it. After a kill, garbage collection removes the files that no manifest names.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import locked, remove_stale_temps, write_file
from osworld_pipeline.columns import is_newer, stored
from osworld_pipeline.errors import StoreBusyError, StoreError
from osworld_pipeline.progress import OnProgress, Tally, tracked
from osworld_pipeline.store.compacted_files import write_compacted
from osworld_pipeline.store.compaction_plan import Choice, Unit, batches, choose_all, choose_some, choose_where
from osworld_pipeline.store.footers import read_footer
from osworld_pipeline.store.old_tokens import OLD_COLUMNS, need_sequences
from osworld_pipeline.store.part_files import (
    COMPACTED,
    DETAILS_OF,
    INCOMING,
    KEY_OF,
    MANIFEST,
    HeadFiles,
    Manifest,
    PartFile,
    compacted_name,
    take_snapshot,
)
from osworld_pipeline.store.reading import read_rows

LOCK_TIMEOUT_S = 2.0
TARGET_BYTES = 64 << 20
MAX_PARTS = 2_000
"""Maximum number of small parts per table for a compaction with a budget."""
RETIRED_GRACE_S = 600.0
_Choose = Callable[[Sequence[Unit], Sequence[Unit], Mapping[str, Set[str]]], Choice]
"""Arguments: small parts, compacted files, and by part the compacted files whose rows it replaces."""


@dataclass(frozen=True, kw_only=True)
class CompactionSummary:
    num_parts: int = 0
    """Small parts merged."""
    num_merged: int = 0
    """Compacted files merged, because they were too small or had rows rewritten since."""
    num_written: int = 0
    """Compacted files made, not counting details."""
    num_rows: int = 0
    """Rows of the head tables."""
    num_newer: int = 0
    """Parts skipped because a newer program wrote them, or the compacted file whose rows they replace."""
    num_removed: int = 0
    """Deleted files that an earlier compaction had retired."""
    num_images: int = 0
    """Images moved from single files into packs."""
    num_packs: int = 0
    """Packs written."""


def compact_parts(
    root: Path,
    *,
    min_parts: int = 8,
    target_bytes: int = TARGET_BYTES,
    budget_bytes: int | None = None,
    retired_grace_s: float = RETIRED_GRACE_S,
    timeout_s: float = LOCK_TIMEOUT_S,
    on_progress: OnProgress | None = None,
) -> CompactionSummary:
    """Merges the small parts of each head table that has at least `min_parts` of them (without a budget also fewer, if
    some replace rows of compacted files), and compacted files that are due (`choose_all`, or `choose_some` with a
    budget); files grow to `target_bytes` (compressed, head and details).

    `budget_bytes`: limit of the bytes read of a table, with 2,000 small parts at most; the rest waits for the next
    call. None: no limit. `timeout_s`: time to wait for other upkeep.

    Raises:
        StoreBusyError: another compaction or collection runs.
        StoreError: a file is damaged, or the file system refused.
    """
    with exclusive(root, timeout_s=timeout_s):
        remove_stale_temps(root / INCOMING)
        Manifest.checked(root)
        need_sequences(root)
        summary = CompactionSummary(num_removed=remove_retired(root, grace_s=retired_grace_s))
        for head in DETAILS_OF:
            choose = _chooser(min_parts=min_parts, target_bytes=target_bytes, budget_bytes=budget_bytes)
            max_parts = None if budget_bytes is None else MAX_PARTS
            summary = _plus(summary, _compact_table(root, head, choose, target_bytes, max_parts, on_progress))
        return summary


def rewrite_parts(
    root: Path, is_due: Callable[[Unit], bool], on_progress: OnProgress | None = None
) -> CompactionSummary:
    """Merges all small parts and compacted files that are due into files of the present schema version, like a
    compaction. The caller holds `exclusive`.

    Raises:
        StoreError: a file is damaged, or the file system refused.
    """
    summary = CompactionSummary()
    for head in DETAILS_OF:
        choose = partial(choose_where, is_due=is_due)
        summary = _plus(summary, _compact_table(root, head, choose, TARGET_BYTES, None, on_progress))
    return summary


def exclusive(root: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
    """The lock for changing the manifest or deleting files. Raises StoreBusyError."""
    return locked(
        root / "upkeep.lock", timeout_s=timeout_s, error=StoreBusyError, what="the upkeep of the trajectories"
    )


def remove_retired(root: Path, *, grace_s: float) -> int:
    """Deletes files that were retired more than `grace_s` ago; the caller holds `exclusive`."""
    manifest = Manifest.checked(root)
    due = [name for name, when in manifest.retired.items() if when <= time.time() - grace_s]
    for name in due:
        path = root / name
        head = name.partition("/")[0]
        for detail in _detail_files(root, head, path).values():
            detail.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    # Only after the files: without its name in the manifest, an existing file would be live again.
    if due:
        kept = {name: when for name, when in manifest.retired.items() if name not in set(due)}
        commit_manifest(root, replace(manifest, retired=kept))
    return len(due)


def _detail_files(root: Path, head: str, path: Path) -> dict[str, Path]:
    """The files with the details of a head, by table."""
    return {table: root / table / path.relative_to(root / head) for table in DETAILS_OF[head]}


def _chooser(*, min_parts: int, target_bytes: int, budget_bytes: int | None) -> _Choose:
    def choose(small: Sequence[Unit], compacted: Sequence[Unit], replaces: Mapping[str, Set[str]]) -> Choice:
        if budget_bytes is None:
            stale = frozenset[str]().union(*replaces.values())
            return choose_all(small, compacted, stale, min_parts=min_parts, target_bytes=target_bytes)
        return choose_some(
            small,
            compacted,
            replaces,
            min_parts=min_parts,
            target_bytes=target_bytes,
            budget_bytes=budget_bytes,
        )

    return choose


def _compact_table(
    root: Path,
    head: str,
    choose: _Choose,
    target_bytes: int,
    max_parts: int | None,
    on_progress: OnProgress | None,
) -> CompactionSummary:
    manifest = Manifest.read(root)
    files = take_snapshot(root, head)
    replaces = _replaced(root, head, files)
    compacted = [_unit(root, head, root / head / COMPACTED / name, None) for name in files.compacted]
    touched = frozenset[str]().union(*replaces.values())
    growing = {unit.head.name for unit in compacted if unit.num_bytes < target_bytes // 2}
    newer = {name for name in touched | growing if _is_newer_file(root, head, root / head / COMPACTED / name)}
    kept = {part for part, names in replaces.items() if names & newer}
    small, num_newer = _small_units(root, head, files, kept, max_parts, on_progress)
    replaces = {unit.part.part: replaces.get(unit.part.part, frozenset()) for unit in small if unit.part}
    choice = choose(small, [unit for unit in compacted if unit.head.name not in newer], replaces)
    if not choice.small and not choice.merged:
        return CompactionSummary(num_newer=num_newer)
    generation = 1 + manifest.generation
    # If a reader finds files of a later generation than the manifest's, the manifest is not the latest.
    commit_manifest(root, replace(manifest, generation=generation))
    taken = {unit.part.part for unit in choice.small if unit.part}
    hidden = files.rewritten
    written: list[str] = []
    num_rows = 0
    units = sorted((*choice.merged, *choice.small), key=lambda unit: _first_key(head, unit))
    merged_files = Tally(on_progress, f"merging {head}", len(units), "files")
    for number, batch in enumerate(batches(units, target_bytes)):
        name = compacted_name(generation, number)
        num_rows += write_compacted(root, head, batch, name, generation, hidden)
        written.append(name)
        merged_files.add(len(batch))
    now = time.time()
    gone = [unit.retires for unit in units]
    gone += [f"{head}/{file.name}" for file in files.superseded if file.part in taken]
    merged = {unit.head.name for unit in choice.merged}
    commit_manifest(
        root,
        Manifest(
            generation=generation,
            files={**manifest.files, head: (*(name for name in files.compacted if name not in merged), *written)},
            retired={**manifest.retired, **dict.fromkeys(gone, now)},
            retired_in={**manifest.retired_in, **dict.fromkeys(gone, generation)},
        ),
    )
    return CompactionSummary(
        num_parts=len(choice.small),
        num_merged=len(merged),
        num_written=len(written),
        num_rows=num_rows,
        num_newer=num_newer,
    )


def _first_key(head: str, unit: Unit) -> str:
    """Sort key of the units, so that an id is in the range of few files."""
    if unit.part is not None:
        return unit.part.part
    return read_footer(unit.head).smallest(KEY_OF[head]) or ""


def _small_units(
    root: Path,
    head: str,
    files: HeadFiles,
    kept: Set[str],
    max_parts: int | None,
    on_progress: OnProgress | None,
) -> tuple[list[Unit], int]:
    """The small parts in the order of their names, which is nearly that of their rows' ids; and the number of skipped
    ones: those of a newer program, and `kept`, whose files replace rows of compacted files that cannot change."""
    units: list[Unit] = []
    num_newer = 0
    for file in tracked(files.small, on_progress, f"reading {head}", "files"):
        if len(units) == max_parts:
            break
        path = root / head / file.name
        if file.part in kept or _is_newer_file(root, head, path):
            num_newer += 1
            continue
        units.append(_unit(root, head, path, file))
    return units, num_newer


def _is_newer_file(root: Path, head: str, path: Path) -> bool:
    """Whether a head or one of its details is newer."""
    return _is_newer(path, head) or any(
        _is_newer(detail, table) for table, detail in _detail_files(root, head, path).items()
    )


def _is_newer(path: Path, table: str) -> bool:
    """Whether rewriting a file would lose data: it has a newer schema version, or columns unknown to this program."""
    try:
        found = pq.read_schema(path)
        return is_newer(found.metadata) or not set(found.names) <= {*stored(table).names, *OLD_COLUMNS.get(table, ())}
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: restore it from a copy, or run its stage again") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it and run its stage again") from error


def _unit(root: Path, head: str, path: Path, part: PartFile | None) -> Unit:
    details = _detail_files(root, head, path)
    try:
        num_bytes = sum(found.stat().st_size for found in (path, *details.values()))
    except FileNotFoundError as error:
        raise StoreError(f"{error.filename} is missing: restore it from a copy, or run its stage again") from error
    return Unit(head=path, details=details, part=part, num_bytes=num_bytes)


def _replaced(root: Path, head: str, files: HeadFiles) -> Mapping[str, Set[str]]:
    """The compacted files with older rows of a small part, by part."""
    parts = sorted(files.rewritten)
    found: dict[str, set[str]] = {}
    for name in files.compacted if parts else ():
        rows = read_rows(root / head / COMPACTED / name, head, "part", parts, columns=["part"])
        for part in rows["part"].unique().to_pylist():
            found.setdefault(part, set()).add(name)
    return found


def commit_manifest(root: Path, manifest: Manifest) -> None:
    write_file(root / MANIFEST, manifest.to_bytes(), temp_folder=root / INCOMING)


def _plus(one: CompactionSummary, other: CompactionSummary) -> CompactionSummary:
    return CompactionSummary(
        **{name: getattr(one, name) + getattr(other, name) for name in CompactionSummary.__dataclass_fields__}
    )
