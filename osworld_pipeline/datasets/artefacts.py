"""The four artefacts of Slime-OSWorld's union build, with its names, columns and values, and a file of rejects."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from osworld_pipeline.atomic_io import parquet_bytes, remove_stale_temps
from osworld_pipeline.datasets.lines import MAX_LINE_BYTES
from osworld_pipeline.datasets.raw import source_files
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.datasets.union.build import UnionSummary, filled, union_stats
from osworld_pipeline.datasets.union.forms import Setup
from osworld_pipeline.datasets.union.replay import OnProgress, ReplaySource, read_replay
from osworld_pipeline.datasets.union.sinks import LineSink, RejectWriter
from osworld_pipeline.datasets.union.tasks import TaskConfigs, join_tasks
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.tables.builds import STATS_FILE

ALL_FILE = "osworld_tasks_all.parquet"
TRAIN_FILE = "osworld_tasks_train.parquet"
REPLAY_FILE = "osworld_replay_train.jsonl"
REJECTS_FILE = "osworld_rejects.parquet"
FILES = (ALL_FILE, TRAIN_FILE, REPLAY_FILE, STATS_FILE, REJECTS_FILE)
TASK_COLUMNS = pa.schema(
    [
        ("task_id", pa.string()),
        ("prompt", pa.string()),
        ("domain", pa.string()),
        ("instruction", pa.string()),
        ("task_config", pa.string()),
        ("task_config_source", pa.string()),
        ("has_task_config", pa.bool_()),
        ("platform", pa.string()),
    ]
)


def write_union_artefacts(
    hf_root: Path,
    osworld_repo: Path,
    output_dir: Path,
    *,
    system_prompt: str,
    dialect: str = "slime",
    with_tree_tasks: bool = False,
    on_progress: OnProgress | None = None,
    num_workers: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> UnionSummary:
    """Writes the five files into `output_dir`, each atomically, when all are complete. `with_tree_tasks`: also include
    tasks that only the OSWorld tree has; Slime-OSWorld omits them.

    Raises:
        DatasetError: no source exists, or a worker died or hangs.
        StoreError: a file cannot be written.
    """
    places = {source.name: _place(source, hf_root, osworld_repo) for source in (*REPLAY_SOURCES, *TASK_SOURCES)}
    absent = [name for name, path in places.items() if not source_files(path)]
    if len(absent) == len(places):
        raise DatasetError(
            f"no source under {hf_root} and no task in {osworld_repo}: name the folder that holds osworld_datasets/"
        )
    remove_stale_temps(output_dir)
    with ExitStack() as stack:
        files = {name: stack.enter_context(filled(output_dir / name)) for name in FILES}
        options = {"system_prompt": system_prompt, "dialect": dialect, "max_line_bytes": max_line_bytes}
        setup = Setup(form="artefact", output=Path(files[REPLAY_FILE].name), **options)
        rejects, lines = RejectWriter(files[REJECTS_FILE]), LineSink(files[REPLAY_FILE])
        for sink in (rejects, lines):
            stack.callback(sink.abandon)
        sources = [ReplaySource(source=source, path=places[source.name]) for source in REPLAY_SOURCES]
        counts = read_replay(
            sources, setup, sink=lines, rejects=rejects, num_workers=num_workers, on_progress=on_progress
        )
        lines.close()
        configs = TaskConfigs()
        for source in TASK_SOURCES:
            configs.read(source, places[source.name])
        task_ids = counts.task_ids | configs.task_ids | set(configs.tree if with_tree_tasks else ())
        tasks = join_tasks(task_ids, configs, counts.replay_ids, is_artefact=True)
        rejects.add([*configs.rejects, *configs.shadowed, *tasks.rejects])
        rejects.close()
        for name, rows in ((ALL_FILE, tasks.rows), (TRAIN_FILE, tasks.train)):
            files[name].write(_table(rows))
        files[STATS_FILE].write(json.dumps(stats := union_stats(tasks, configs, counts), indent=2).encode())
    return UnionSummary(
        stats=stats,
        num_rows={
            ALL_FILE: len(tasks.rows),
            TRAIN_FILE: len(tasks.train),
            REPLAY_FILE: counts.kept.total(),
            REJECTS_FILE: rejects.by_kind.total(),
        },
        num_rejects=dict(rejects.by_kind),
        num_duplicates=counts.num_duplicates,
        absent=absent,
    )


def _place(source: Source, hf_root: Path, osworld_repo: Path) -> Path:
    return osworld_repo if source.kind == "task_tree" else hf_root / source.path


def _table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return parquet_bytes(pa.Table.from_pylist([dict(row) for row in rows], schema=TASK_COLUMNS))
