"""Slime-OSWorld's union build into the tables: all tasks, the replay buffer, and the tasks that can be trained on. It
parses the raw sources and the imports once, in bounded memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from osworld_pipeline.atomic_io import parquet_bytes, remove_stale_temps, replacing
from osworld_pipeline.columns import RAW_COUNTS, UNION_TASKS
from osworld_pipeline.datasets.imports import ImportFolder, find_imports
from osworld_pipeline.datasets.lines import MAX_LINE_BYTES, size_of
from osworld_pipeline.datasets.raw import file_sha256, source_files
from osworld_pipeline.datasets.source_lock import read_source_lock
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.datasets.union.duplicates import list_duplicates
from osworld_pipeline.datasets.union.forms import Setup
from osworld_pipeline.datasets.union.replay import OnProgress, ReplayCounts, ReplaySource, read_replay
from osworld_pipeline.datasets.union.sinks import RejectWriter, RowSink
from osworld_pipeline.datasets.union.tasks import TaskConfigs, UnionTasks, join_tasks
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.blobs import INCOMING
from osworld_pipeline.tables.builds import STATS_FILE, UNION_TABLES, new_build


@dataclass(frozen=True, kw_only=True)
class UnionSummary:
    stats: Mapping[str, Any]
    """The keys of Slime-OSWorld's osworld_train_stats.json."""
    num_rows: Mapping[str, int]
    """Number of rows by table, or by artefact."""
    num_rejects: Mapping[str, int]
    """Number of rejects by kind."""
    num_duplicates: int
    """Demonstrations that are equal to one read earlier, in the same or another source."""
    absent: Sequence[str]
    """Missing sources."""


def build_union_tables(
    state: StateDir,
    *,
    system_prompt: str,
    dialect: str = "slime",
    on_progress: OnProgress | None = None,
    num_workers: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> UnionSummary:
    """Writes the tables union_tasks, replay_buffer, train_tasks, rejects and raw_counts, and their statistics as one
    atomic build; images go to the blob store. `num_workers`: additional processes; None: one per core, at most
    `replay.MAX_WORKERS`.

    Raises:
        DatasetError: a worker died or hangs, or the lock file of the sources is damaged.
        StoreError: a table or an image cannot be written.
    """
    imports, broken = find_imports(state.imports)
    setup = Setup(
        form="table", system_prompt=system_prompt, dialect=dialect, max_line_bytes=max_line_bytes, blobs=state.blobs
    )
    remove_stale_temps(state.blobs / INCOMING)
    with new_build(state) as build, ExitStack() as stack:
        files = {name: stack.enter_context(filled(build / f"{name}.parquet")) for name in UNION_TABLES}
        stats_file = stack.enter_context(filled(build / STATS_FILE))
        rejects, rows = RejectWriter(files["rejects"]), RowSink(files["replay_buffer"])
        for sink in (rejects, rows):
            stack.callback(sink.abandon)
        rejects.add(broken)
        sources = _replay_sources(state, imports)
        counts = read_replay(
            sources, setup, sink=rows, rejects=rejects, num_workers=num_workers, on_progress=on_progress
        )
        rows.close()
        list_duplicates(files["replay_buffer"], counts.duplicates)
        configs = _task_configs(state, imports)
        task_ids = counts.task_ids | configs.task_ids | set(configs.tree)
        tasks = join_tasks(task_ids, configs, counts.replay_ids, is_artefact=False)
        rejects.add(chain(*(item.rejects() for item in imports), configs.rejects, tasks.rejects))
        rejects.close()
        for name, rows_of in (("union_tasks", tasks.rows), ("train_tasks", tasks.train)):
            files[name].write(parquet_bytes(pa.Table.from_pylist(rows_of, schema=UNION_TASKS)))
        raw_counts = _raw_counts(state, imports, (counts.num_records, configs.num_records), rejects)
        files["raw_counts"].write(parquet_bytes(raw_counts))
        stats = union_stats(tasks, configs, counts)
        notes = {**stats, "num_duplicates": counts.num_duplicates, "rejects": dict(rejects.by_kind)}
        stats_file.write(orjson.dumps(notes, option=orjson.OPT_INDENT_2))
    return UnionSummary(
        stats=stats,
        num_rows={
            "union_tasks": len(tasks.rows),
            "replay_buffer": counts.kept.total(),
            "train_tasks": len(tasks.train),
            "rejects": rejects.by_kind.total(),
            "raw_counts": raw_counts.num_rows,
        },
        num_rejects=dict(rejects.by_kind),
        num_duplicates=counts.num_duplicates,
        absent=[source.name for source in (*REPLAY_SOURCES, *TASK_SOURCES) if not source_files(source.locate(state))],
    )


def _replay_sources(state: StateDir, imports: Sequence[ImportFolder]) -> list[ReplaySource]:
    locks = read_source_lock(state.datasets)
    found = [
        ReplaySource(
            source=source,
            path=source.locate(state),
            licence=lock.licence if (lock := locks.get(source.name)) else "",
        )
        for source in REPLAY_SOURCES
    ]
    return found + [
        ReplaySource(
            source=item.demonstrations,
            path=item.demonstrations.locate(state),
            licence=item.manifest.licence or "",
            is_import=True,
        )
        for item in imports
    ]


def _task_configs(state: StateDir, imports: Sequence[ImportFolder]) -> TaskConfigs:
    configs = TaskConfigs()
    for source in TASK_SOURCES:
        configs.read(source, source.locate(state))
    for item in imports:
        configs.read(item.tasks, item.tasks.locate(state), is_import=True)
    return configs


@contextmanager
def filled(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that is renamed to `path` at the end. Raises StoreError."""
    with replacing(path) as temp, temp.open("wb") as file:
        yield file


def union_stats(tasks: UnionTasks, configs: TaskConfigs, counts: ReplayCounts) -> dict[str, Any]:
    return {
        "union_task_ids": len(tasks.rows),
        "task_config_distill": len(configs.distill),
        "task_config_osworld": len(configs.tree),
        "union_all_rows": len(tasks.rows),
        "union_ready_rows": len(tasks.train),
        "replay_ready_rows": len(tasks.train),
        "platform_counts": dict(Counter(row["platform"] for row in tasks.rows)),
        "replay_stats": counts.stats(),
    }


def _raw_counts(
    state: StateDir,
    imports: Sequence[ImportFolder],
    num_records: tuple[Counter[str], Counter[str]],
    rejects: RejectWriter,
) -> pa.Table:
    locks = read_source_lock(state.datasets)

    def row(source: Source, licence: str | None, revision: str | None) -> dict[str, Any]:
        path = source.locate(state)
        files = source_files(path)
        return {
            "source_dataset": source.name,
            "source_path": source.path,
            "licence": licence or None,
            "revision": revision or None,
            "sha256": file_sha256(files) if files else None,
            "is_present": bool(files),
            "num_bytes": sum(map(size_of, files)) if files else None,
            "num_records": num_records[source.kind != "demonstrations"][source.name],
            "num_rejects": rejects.by_source[source.name],
        }

    rows = []
    for source in (*REPLAY_SOURCES, *TASK_SOURCES):
        lock = locks.get(source.name)
        rows.append(row(source, lock.licence if lock else None, lock.revision if lock else None))
    rows += [row(item.demonstrations, item.manifest.licence, item.manifest.revision) for item in imports]
    return pa.Table.from_pylist(rows, schema=RAW_COUNTS)
