"""The demonstrations of the union: reads all sources once, in blocks, best first, and keeps each demonstration once."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from osworld_pipeline.datasets.lines import BLOCK_BYTES, find_file, other_files, read_blocks, size_of
from osworld_pipeline.datasets.raw import NO_FILE
from osworld_pipeline.datasets.rejects import Reject
from osworld_pipeline.datasets.sources import Source
from osworld_pipeline.datasets.union.blocks import Reading
from osworld_pipeline.datasets.union.duplicates import Duplicate
from osworld_pipeline.datasets.union.forms import Origin, Setup, row_id_of
from osworld_pipeline.datasets.union.pool import Job, read_blocks_in_order
from osworld_pipeline.datasets.union.sinks import PayloadSink, RejectWriter

MAX_WORKERS = 4
SMALL_BYTES = 4 * 2**20
"""Below this size, starting workers costs more than it saves."""

OnProgress = Callable[[str, int, int], None]
"""Called with the source's name, the bytes read so far and the bytes of all sources."""


@dataclass(frozen=True, kw_only=True)
class ReplaySource:
    """A source of demonstrations and its path."""

    source: Source
    path: Path
    licence: str = ""
    is_import: bool = False

    @property
    def origin(self) -> Origin:
        return Origin(
            source=self.source.name,
            path=self.source.path,
            folder=self.path.parent,
            quality_rank=self.source.quality_rank,
            licence=self.licence,
            is_import=self.is_import,
        )


@dataclass(kw_only=True)
class ReplayCounts:
    num_records: Counter[str] = field(default_factory=Counter)
    """JSON objects by source, usable or not."""
    kept: Counter[str] = field(default_factory=Counter)
    """Number of kept rows by source, in order of first appearance."""
    num_dropped_parse: int = 0
    num_duplicates: int = 0
    duplicates: dict[str, list[Duplicate]] = field(default_factory=dict)
    """Duplicates by the id of the kept row; used only by the table."""
    task_ids: set[str] = field(default_factory=set)
    """Base ids of all records with a readable id."""
    replay_ids: set[str] = field(default_factory=set)
    """Base ids of the demonstrations."""

    def stats(self) -> dict[str, object]:
        return {
            "input_samples": self.num_records.total(),
            "kept_samples": self.kept.total(),
            "dropped_parse": self.num_dropped_parse,
            # Replacements by a better source: none, because the best source comes first.
            "deduped": 0,
            "per_dataset": dict(self.kept),
        }


def read_replay(
    sources: Sequence[ReplaySource],
    setup: Setup,
    *,
    sink: PayloadSink,
    rejects: RejectWriter,
    num_workers: int | None,
    on_progress: OnProgress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> ReplayCounts:
    """Writes each demonstration's first appearance into `sink`; memory holds a few blocks, 16 bytes of every key, and
    the places of duplicates. `num_workers`: None means one per core, at most MAX_WORKERS; no worker is started if all
    sources together have less than SMALL_BYTES.

    Raises:
        DatasetError: a worker died or hangs.
        StoreError: a blob cannot be written.
        OSError: the output cannot be written.
    """
    ledger = _Ledger(rejects=rejects, lists_duplicates=setup.form == "table")
    files = _found_files(sources, rejects)
    total, done = sum(size_of(file) for _, file in files), 0

    def jobs() -> Iterator[Job]:
        for item, file in files:
            for block in read_blocks(file, block_bytes=block_bytes, max_line_bytes=setup.max_line_bytes):
                yield block, item.origin

    if num_workers is None:
        num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    num_workers = 0 if total < SMALL_BYTES else num_workers
    for job, payload in read_blocks_in_order(jobs(), setup, ledger.decide, num_workers=num_workers):
        if payload:
            sink.add(payload)
        del payload
        done += job[0].num_file_bytes
        if on_progress is not None:
            on_progress(job[1].source, done, total)
    return ledger.counts


def _found_files(sources: Sequence[ReplaySource], rejects: RejectWriter) -> list[tuple[ReplaySource, Path]]:
    """The file of each existing source, best first; a second form of a source is a reject."""
    ordered = sorted(sources, key=lambda item: -item.source.quality_rank)
    files = [(item, file) for item in ordered if (file := find_file(item.path))]
    for item in ordered:
        if item.path.is_dir():
            place = {"source": item.source.name, "path": item.source.path, "line_no": 0}
            rejects.add([Reject(**place, kind="unreadable", reason=NO_FILE)])
    for item, file in files:
        for other in other_files(item.path):
            reason = f"{file.name} in the same folder was read instead"
            place = str(Path(item.source.path).with_name(other.name))
            rejects.add([Reject(source=item.source.name, path=place, line_no=0, kind="duplicate_file", reason=reason)])
    return files


@dataclass(kw_only=True)
class _Ledger:
    """The keys and counts so far; `decide`, called for the blocks in order, returns what is new in each."""

    rejects: RejectWriter
    lists_duplicates: bool
    counts: ReplayCounts = field(default_factory=ReplayCounts)
    keys: set[bytes] = field(default_factory=set)
    lines_before: Counter[str] = field(default_factory=Counter)
    """Number of lines before the next block, by path."""

    def decide(self, job: Job, reading: Reading) -> tuple[list[int], int]:
        origin, counts = job[1], self.counts
        first_line = self.lines_before[origin.path]
        self.lines_before[origin.path] += reading.num_lines
        kept = []
        for index, key in enumerate(reading.keys):
            if key not in self.keys:
                self.keys.add(key)
                kept.append(index)
            elif self.lists_duplicates:
                line_no, reward = reading.places[index]
                counts.duplicates.setdefault(row_id_of(key), []).append(
                    {
                        "source_dataset": origin.source,
                        "source_path": origin.path,
                        "source_line": first_line + line_no,
                        "reward": reward,
                    }
                )
        counts.num_records[origin.source] += reading.num_records
        if kept:
            counts.kept[origin.source] += len(kept)
        counts.num_duplicates += len(reading.keys) - len(kept)
        counts.task_ids.update(reading.base_ids, reading.other_ids)
        counts.replay_ids.update(reading.base_ids)
        counts.num_dropped_parse += sum(kind == "dropped_parse" for _, kind, _, _ in reading.faults)
        self.rejects.add(
            Reject(
                source=origin.source,
                path=origin.path,
                line_no=first_line + line if line else 0,
                kind=kind,
                reason=reason,
                task_id=task_id,
            )
            for line, kind, reason, task_id in reading.faults
        )
        return kept, first_line
