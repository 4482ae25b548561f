"""The union build of spec 01: every task seen anywhere, the replay buffer, and the tasks that can be trained on."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from osworld_pipeline.columns import RAW_COUNTS, REJECTS, UNION_TASKS
from osworld_pipeline.datasets.raw import REPLAY_SOURCES, TASK_SOURCES, RawTask, Reject, read_tasks
from osworld_pipeline.datasets.replay import ReplayBuild, build_replay, load_replay_rows
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.durable import write_file
from osworld_pipeline.errors import TaskError
from osworld_pipeline.tables.owned import write_table

__all__ = ["UnionResult", "build_union", "load_replay_rows", "write_union"]

STATS_FILE = "osworld_train_stats.json"
_WINDOWS_SNAPSHOTS = ("excel", "word", "powerpoint")
_WINDOWS_PATH = re.compile(r"(?<![A-Za-z])C:[\\/]|\\Users\\")


@dataclass(frozen=True, kw_only=True)
class UnionResult:
    tasks: pa.Table
    replay: pa.Table
    train_tasks: pa.Table
    rejects: pa.Table
    raw_counts: pa.Table
    stats: Mapping[str, Any]
    """As in spec 01's osworld_train_stats.json, with `rejects` by kind beside it."""


@dataclass(frozen=True, kw_only=True)
class TaskConfigs:
    """Configs by base id; within a kind of source the first one wins."""

    distill: Mapping[str, RawTask]
    tree: Mapping[str, RawTask]
    task_ids: frozenset[str]
    num_records: Mapping[str, int]
    rejects: tuple[Reject, ...]


def build_union(state: StateDir, *, system_prompt: str, dialect: str = "slime") -> UnionResult:
    """Reads every raw source once and returns the tables; only image blobs are written.

    Raises:
        DatasetError: a source is there and cannot be read.
        StoreError: an image cannot be stored.
    """
    replay = build_replay(state, system_prompt=system_prompt, dialect=dialect)
    configs = _read_configs(state)
    task_ids = sorted(replay.task_ids | configs.task_ids)
    rows = [_task_row(task_id, configs) for task_id in task_ids]
    replay_ids = set(replay.table.column("task_id").to_pylist())
    ready = [row for row in rows if row["has_task_config"] and row["platform"] != "windows"]
    train: list[dict[str, Any]] = []
    unusable: list[Reject] = []
    for row in ready:
        if row["task_id"] not in replay_ids:
            continue
        problem = _why_unusable(row)
        if problem is None:
            train.append(row)
        else:
            chosen = configs.distill.get(row["task_id"]) or configs.tree[row["task_id"]]
            unusable.append(_bad_task(chosen, problem))
    rejects = [*replay.rejects, *configs.rejects, *unusable]
    return UnionResult(
        tasks=pa.Table.from_pylist(rows, schema=UNION_TASKS),
        replay=replay.table,
        train_tasks=pa.Table.from_pylist(train, schema=UNION_TASKS),
        rejects=pa.Table.from_pylist([_reject_row(reject) for reject in rejects], schema=REJECTS),
        raw_counts=_raw_counts(state, {**replay.num_records, **configs.num_records}, rejects),
        stats=_stats(rows, ready, train, configs, replay, rejects),
    )


def write_union(state: StateDir, result: UnionResult) -> None:
    """Writes the five tables, each whole or not at all, and the statistics beside them. Raises StoreError."""
    write_table(state, "union_tasks", result.tasks)
    write_table(state, "replay_buffer", result.replay)
    write_table(state, "train_tasks", result.train_tasks)
    write_table(state, "rejects", result.rejects)
    write_table(state, "raw_counts", result.raw_counts)
    write_file(state.tables / STATS_FILE, orjson.dumps(result.stats, option=orjson.OPT_INDENT_2))


def _read_configs(state: StateDir) -> TaskConfigs:
    distill: dict[str, RawTask] = {}
    tree: dict[str, RawTask] = {}
    task_ids: set[str] = set()
    num_records: Counter[str] = Counter()
    rejects: list[Reject] = []
    for source in TASK_SOURCES:
        for item in read_tasks(state, source):
            if isinstance(item, Reject):
                rejects.append(item)
                continue
            num_records[source.name] += 1
            task_ids.add(item.base_id)
            if item.config is not None:
                configs = tree if source.kind == "task_tree" else distill
                configs.setdefault(item.base_id, item)
    return TaskConfigs(
        distill=distill,
        tree=tree,
        task_ids=frozenset(task_ids),
        num_records=num_records,
        rejects=tuple(rejects),
    )


def _task_row(task_id: str, configs: TaskConfigs) -> dict[str, Any]:
    """The distill config wins over the tree's; the tree's folder still tells the domain."""
    in_tree = configs.tree.get(task_id)
    chosen = configs.distill.get(task_id) or in_tree
    if chosen is None or chosen.config is None:
        return {
            "task_id": task_id,
            "prompt": task_id,
            "domain": "",
            "instruction": "",
            "task_config": "{}",
            "task_config_source": "missing",
            "has_task_config": False,
            "platform": "unknown",
        }
    config = {**chosen.config, "id": task_id}
    instruction = config.get("instruction")
    return {
        "task_id": task_id,
        "prompt": task_id,
        "domain": _domain(config, chosen, in_tree),
        "instruction": instruction if isinstance(instruction, str) else "",
        "task_config": canonical_json(config),
        "task_config_source": "distill_data" if task_id in configs.distill else "osworld_repo",
        "has_task_config": True,
        "platform": "windows" if _is_windows(config) else "ubuntu",
    }


def _domain(config: Mapping[str, Any], chosen: RawTask, in_tree: RawTask | None) -> str:
    apps = config.get("related_apps")
    first_app = apps[0] if isinstance(apps, list) and apps else ""
    candidates = (config.get("domain"), chosen.domain, in_tree.domain if in_tree else "", first_app)
    return next((name for name in candidates if isinstance(name, str) and name), "")


def _is_windows(config: Mapping[str, Any]) -> bool:
    if str(config.get("snapshot", "")).lower() in _WINDOWS_SNAPSHOTS:
        return True
    return any(_WINDOWS_PATH.search(text) for text in _texts(config))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _why_unusable(row: Mapping[str, Any]) -> str | None:
    try:
        Task.from_config(orjson.loads(row["task_config"]))
    except TaskError as error:
        return str(error)
    return None


def _bad_task(task: RawTask, reason: str) -> Reject:
    return Reject(
        source=task.source, path=task.path, line_no=task.line_no, kind="bad_task", reason=reason, task_id=task.base_id
    )


def _reject_row(reject: Reject) -> dict[str, Any]:
    return {
        "source_dataset": reject.source,
        "source_path": reject.path,
        "source_line": reject.line_no,
        "kind": reject.kind,
        "reason": reject.reason,
        "task_id": reject.task_id or None,
    }


def _raw_counts(state: StateDir, num_records: Mapping[str, int], rejects: list[Reject]) -> pa.Table:
    num_rejects = Counter(reject.source for reject in rejects)
    rows = []
    for source in (*REPLAY_SOURCES, *TASK_SOURCES):
        path = source.locate(state)
        rows.append(
            {
                "source_dataset": source.name,
                "source_path": source.path,
                "is_present": path.exists(),
                "num_bytes": path.stat().st_size if path.is_file() else None,
                "num_records": num_records.get(source.name, 0),
                "num_rejects": num_rejects[source.name],
            }
        )
    return pa.Table.from_pylist(rows, schema=RAW_COUNTS)


def _stats(
    rows: list[dict[str, Any]],
    ready: list[dict[str, Any]],
    train: list[dict[str, Any]],
    configs: TaskConfigs,
    replay: ReplayBuild,
    rejects: list[Reject],
) -> dict[str, Any]:
    return {
        "union_task_ids": len(rows),
        "task_config_distill": len(configs.distill),
        "task_config_osworld": len(configs.tree),
        "union_all_rows": len(rows),
        "union_ready_rows": len(ready),
        "replay_ready_rows": len(train),
        "platform_counts": dict(Counter(row["platform"] for row in rows)),
        "replay_stats": dict(replay.stats),
        "rejects": dict(Counter(str(reject.kind) for reject in rejects)),
    }
