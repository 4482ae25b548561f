"""Writes recorded demonstrations as raw sources. They are distributed over the files that such datasets consist of,
with duplicates, chunks and broken lines as in real data. The output is deterministic."""

import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.datasets.demonstration_records import (
    broken_lines,
    chunk_records,
    line_of,
    pyautogui_record,
    unknown_action_record,
    whole_record,
)
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError

# Names of sources, as sources.py lists them.
FINAL, V3, HYBRID, COMBINED, CLEAN, BC = (
    "sft_curated_final",
    "sft_curated_v3",
    "sft_hybrid",
    "combined_sft",
    "sft_clean",
    "bc_sft",
)
EXPLORATORY = "exploratory_rollouts"

CHUNKED_SHARE = 0.3
"""Of the demonstrations that are long enough for chunks, the share that is also written in chunks."""
DUPLICATE_SHARE = 0.3
PYAUTOGUI_RECORDS = 2
UNKNOWN_ACTION_RECORDS = 3
DISTILL_SHARE = 0.7
"""Share of training tasks whose configuration is in the distill table; the OSWorld tree has all of them."""


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    task_id: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat turns: system, then user and assistant in turn; content always a list of {type: text|image}."""
    images: tuple[bytes, ...]
    """Encoded screenshots as a model sees them, in placeholder order."""
    reward: float
    """The grader's score of this recording."""

    @property
    def num_steps(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class RawSources:
    """The sources written, with their numbers of records (including unreadable lines)."""

    num_records: Mapping[str, int]
    num_tasks: int


def write_raw_sources(
    demonstrations: Sequence[Demonstration],
    *,
    train_tasks: Sequence[Task],
    heldout_tasks: Sequence[Task],
    state: StateDir,
    seed: int,
) -> RawSources:
    """Writes the raw sources under `state.datasets` and the OSWorld tree under `state.osworld_repo`. Each file is
    written atomically.

    Raises:
        DatasetError: no demonstration, or one of an unknown task.
        StoreError: a file cannot be written.
    """
    known = {task.task_id for task in train_tasks}
    strangers = sorted({item.task_id for item in demonstrations} - known)
    if not demonstrations or strangers:
        why = f"{strangers[0]} has a demonstration and is not a training task" if strangers else "no demonstration"
        raise DatasetError(f"cannot write raw sources: {why}; record demonstrations of the training tasks first")
    ordered = sorted(demonstrations, key=lambda item: (item.task_id, item.messages[-1]["content"][0]["text"]))
    places = {source.name: source.locate(state) for source in (*REPLAY_SOURCES, *TASK_SOURCES)}
    lines = _spread(ordered, random.Random(f"raw-sources/{seed}"))
    tables = _task_tables(train_tasks, heldout_tasks, random.Random(f"task-tables/{seed}"))
    for name, rows in lines.items():
        # One of the files lacks its last newline, like a file that was cut by hand.
        write_file(places[name], b"\n".join(rows) + (b"" if name == BC else b"\n"))
    for name, rows in tables.items():
        write_file(places[name], _parquet(rows))
    _write_osworld_tree([*train_tasks, *heldout_tasks, WINDOWS_IN_TREE], state.osworld_repo)
    num_records = {name: len(rows) for name, rows in [*lines.items(), *tables.items()]}
    return RawSources(num_records=num_records, num_tasks=len(train_tasks) + len(heldout_tasks))


def _spread(demonstrations: Sequence[Demonstration], rng: random.Random) -> dict[str, list[bytes]]:
    """The lines of each source file. Each demonstration is complete and valid in one source; the other sources contain
    duplicates, parts and invalid records."""
    sources: dict[str, list[bytes]] = {name: [] for name in (FINAL, V3, HYBRID, COMBINED, CLEAN, BC, EXPLORATORY)}
    for item in demonstrations:
        home = rng.choices((FINAL, V3, COMBINED, CLEAN), weights=(5, 3, 1, 1))[0]
        sources[home].append(line_of(_record_for(home, item)))
        if rng.random() < DUPLICATE_SHARE:
            other = rng.choice([name for name in (V3, COMBINED, CLEAN) if name != home])
            sources[other].append(line_of(_record_for(other, item)))
        if item.num_steps >= 3 and rng.random() < CHUNKED_SHARE:
            sources[HYBRID] += [line_of(record) for record in chunk_records(item.task_id, item.messages, item.images)]
        sources[EXPLORATORY].append(line_of({"task_id": item.task_id, "reward": item.reward, "turns": item.num_steps}))
    # With few demonstrations some files would otherwise be empty, and an empty file is not a source.
    for name in (FINAL, V3, HYBRID, COMBINED, CLEAN):
        if not sources[name]:
            sources[name].append(line_of(_record_for(name, demonstrations[0])))
    odd = rng.sample(demonstrations, min(len(demonstrations), PYAUTOGUI_RECORDS + UNKNOWN_ACTION_RECORDS))
    for index, item in enumerate(odd):
        make = pyautogui_record if index < PYAUTOGUI_RECORDS else unknown_action_record
        sources[BC].append(line_of(make(item.task_id, item.messages, item.images)))
    sources[BC].append(line_of(_record_for(BC, demonstrations[-1])))
    for name, line in zip((BC, CLEAN, COMBINED, HYBRID), broken_lines(sources[FINAL][0]), strict=True):
        sources[name].insert(rng.randrange(len(sources[name])), line)
    sources[EXPLORATORY] += [
        line_of({"task_id": task.task_id, "reward": 0.0}) for task in (WINDOWS_DISTILLED, WINDOWS_IN_TREE)
    ]
    sources[EXPLORATORY] += [b'{"task_id": "desktop-basics-expl', line_of({"id": "desktop-basics-unconfigured_chunk2"})]
    return sources


def _record_for(source: str, item: Demonstration) -> dict[str, Any]:
    """A whole demonstration in the format of that source."""
    id_key = {FINAL: "task_id", V3: "id", HYBRID: "metadata", COMBINED: "task_id", CLEAN: "id", BC: "metadata"}[source]
    return whole_record(
        item.task_id,
        item.messages,
        item.images,
        id_key=id_key,
        turns_key="conversations" if source in (HYBRID, CLEAN) else "messages",
        as_text=source in (V3, BC),
        data_uri=source in (V3, CLEAN),
        reward=item.reward if source in (FINAL, COMBINED) else None,
    )


def _windows_task(number: int, *, snapshot: str) -> Task:
    """A task of another platform; no demonstration here is for it."""
    config = {
        "id": f"desktop-basics-windows-{number:04d}",
        "snapshot": snapshot,
        "instruction": "Save the open workbook as totals.xlsx.",
        "source": "desktop-basics/windows",
        "config": [{"type": "open", "parameters": {"path": "C:\\Users\\user\\Desktop\\book.xlsx"}}],
        "related_apps": ["excel"],
        "evaluator": {
            "func": "exact_match",
            "result": {"type": "vm_command_line", "command": "dir /b C:\\Users\\user\\Desktop", "shell": True},
            "expected": {"type": "rule", "rules": {"expected": "totals.xlsx\n"}},
        },
    }
    return Task.from_config(config)


# One is recognised by its snapshot and is in the distill table; one is recognised by its paths and is in the OSWorld
# tree.
WINDOWS_DISTILLED = _windows_task(0, snapshot="excel")
WINDOWS_IN_TREE = _windows_task(1, snapshot="os")


def _task_tables(
    train_tasks: Sequence[Task], heldout_tasks: Sequence[Task], rng: random.Random
) -> dict[str, list[dict[str, Any]]]:
    distilled = [task for task in train_tasks if rng.random() < DISTILL_SHARE] or list(train_tasks[:1])
    rows = [_task_row(task) for task in distilled] + [_task_row(WINDOWS_DISTILLED)]
    # A second configuration of one task, of which the build uses the first; and one under a chunk's id, of which it
    # uses the base id.
    again = {**distilled[0].config, "source": "a second copy"}
    rows.append({**_task_row(distilled[0]), "task_config": json.dumps(again)})
    chunk_id = f"{distilled[-1].task_id}_chunk1"
    rows.append({**_task_row(distilled[-1]), "task_id": chunk_id, "prompt": chunk_id})
    variance = [_task_row(task) for task in distilled[::3]]
    ids = [{"prompt": task.task_id, "task_id": task.task_id} for task in train_tasks]
    return {
        "distill_train": rows,
        "distill_test": [_task_row(task) for task in heldout_tasks],
        "variance_subset": variance,
        "gspo_tasks": ids,
        "gspo_tasks_aligned": ids[::2],
    }


def _task_row(task: Task) -> dict[str, Any]:
    return {
        "prompt": task.task_id,
        "task_id": task.task_id,
        "domain": task.domain,
        "instruction": task.instruction,
        "task_config": json.dumps(task.config),
    }


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    columns = list(rows[0]) if rows else ["prompt", "task_id", "domain", "instruction", "task_config"]
    schema = pa.schema([(name, pa.string()) for name in columns])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def _write_osworld_tree(tasks: Iterable[Task], root: Path) -> None:
    examples = root / "evaluation_examples" / "examples"
    index: dict[str, list[str]] = {}
    written: set[Path] = set()
    for task in tasks:
        path = examples / task.domain / f"{task.task_id}.json"
        write_file(path, json.dumps(task.config, indent=2).encode())
        written.add(path)
        index.setdefault(task.domain, []).append(task.task_id)
    for stale in examples.glob("*/desktop-basics-*.json"):
        # Tasks that an earlier, larger suite wrote here. The files of a real OSWorld checkout stay.
        if stale not in written:
            stale.unlink(missing_ok=True)
    write_file(root / "evaluation_examples" / "test_all.json", json.dumps(index, indent=2).encode())
