"""A state folder that grows as in a laboratory: phases of training with their groups, evaluations between them, and the
tables. It has the real columns in real parts, made column by column, so that any size takes minutes and not days."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from osworld_pipeline.atomic_io import parquet_bytes
from osworld_pipeline.columns import marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store.part_files import HEAD_OF, KEY_OF, VERSION_SHIFT
from osworld_pipeline.tables.owned import read_table, write_table

NUM_TASKS, GROUP, UPDATE, PHASE = 369, 8, 64, 6_400
"""Tasks of an evaluation; episodes of a group, of an update and of a phase of training."""
STEPS, TOKENS = 20, 1_000
"""Steps and tokens of an episode. A real one has several thousand tokens, mostly a prompt that compresses well."""
FIRST_MS = 1_700_000_000_000
WORDS = np.array(
    ["open", "folder", "click", "save", "type", "rename", "window", "button", "list", "scroll", "wait", "menu"]
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Episodes that belong together: a phase of training, or an evaluation of its checkpoint."""

    stage_key: str
    checkpoint_id: str
    is_training: bool
    first: int
    count: int

    def episode_id(self, place: int) -> str:
        if self.is_training:
            return f"{self.stage_key}-u{place // UPDATE:04d}-g{place % UPDATE // GROUP:02d}-s{place % GROUP:02d}"
        return f"{self.stage_key}-{_task(place)}-s{place // NUM_TASKS}"


def write_state(state: StateDir, num_episodes: int, *, first: int = 0, is_batched: bool = True) -> "list[Run]":
    """Add the episodes number `first` to `first + num_episodes`; returns their runs.

    `is_batched`: training as one part an update, evaluations as one large part; else one part an episode, as before a
    merge.
    """
    runs = list(_runs(first, num_episodes))
    for run in runs:
        size = 1 if not is_batched else (UPDATE if run.is_training else run.count)
        for start in range(0, run.count, size):
            _write_part(state, run, range(start, min(start + size, run.count)))
    _write_tables(state, runs)
    return runs


def _runs(first: int, num_episodes: int) -> "list[Run]":
    """A phase, then one evaluation of its checkpoint with eight episodes of each task, and so on."""
    runs: list[Run] = []
    at, number = first, first
    while at < first + num_episodes:
        name = f"gspo_phase1-{number:012x}"
        for stage_key, size in ((name, PHASE), (f"eval-{name}-0123456789ab", NUM_TASKS * 8)):
            count = min(size, first + num_episodes - at)
            if count > 0:
                runs.append(
                    Run(
                        stage_key=stage_key,
                        checkpoint_id=name,
                        is_training=stage_key == name,
                        first=at,
                        count=count,
                    )
                )
            at += count
        number += 1
    return runs


def _task(place: int) -> str:
    return f"desktop-basics-rename_folder-{place % NUM_TASKS:04d}"


def _write_part(state: StateDir, run: Run, places: range) -> None:
    draw = np.random.default_rng(run.first + places.start)
    ids = [run.episode_id(place) for place in places]
    if len(places) == 1:
        part = ids[0]
    else:
        part = f"{run.stage_key}-u{places.start // UPDATE:04d}" if run.is_training else f"batch-{run.stage_key}"
    version = (FIRST_MS + run.first + places.start) << VERSION_SHIFT
    file = f"{part}~{version:016x}-{secrets.token_hex(3)}.parquet"
    book = {"part": part, "part_version": version}
    update = places.start // UPDATE if run.is_training else -1
    heads = _heads(run, places, ids, draw)
    common = {"checkpoint_id": run.checkpoint_id, "purpose": heads["purpose"], "update": update}
    _write(state, "steps", file, _steps(ids, draw) | common | book)
    _write(state, "sequences", file, _sequences(ids, draw) | book)
    _write(state, "episodes", file, heads | common | book)
    if run.is_training and len(places) > 1:
        groups = _groups(run, places, heads["task_reward"])
        _write(state, "injections", file, {"group_id": []} | book)
        _write(state, "rollout_groups", file, groups | {"update": update} | book)


def _heads(run: Run, places: range, ids: Sequence[str], draw: np.random.Generator) -> dict[str, Any]:
    count = len(places)
    is_success = draw.random(count) < 0.4
    numbers = np.arange(run.first + places.start, run.first + places.stop)
    return {
        "episode_id": ids,
        "task_id": [_task(place // GROUP if run.is_training else place) for place in places],
        "purpose": "train" if run.is_training else "evaluate",
        "stage_key": run.stage_key,
        "group_id": [name.rpartition("-")[0] for name in ids] if run.is_training else None,
        "seed": np.array(places) // (1 if run.is_training else NUM_TASKS),
        "attempt": 0, "is_valid": True,
        "outcome": np.where(is_success, "success", "failure").tolist(), "is_success": is_success,
        "task_reward": is_success * 1.0, "shaped_reward": np.round(draw.random(count), 3),
        "num_steps": STEPS, "max_turns": STEPS, "engine": "sglang", "provider": "qemu", "temperature": 0.8,
        "top_p": 1.0, "max_new_tokens": 256, "sampling_seed": 0, "stop": [[]] * count, "task_digest": "d",
        "times_s": [[("total", 60.0), ("model", 40.0)]] * count, "run_ids": [[]] * count,
        "started_at": 1_700_000_000.0 + numbers * 3.0,
        "context_mode": "append",
    }  # fmt: skip


def _sequences(ids: Sequence[str], draw: np.random.Generator) -> dict[str, Any]:
    count = len(ids)
    lists = pa.array(np.arange(0, (count + 1) * TOKENS, TOKENS), pa.int32())

    def each(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(lists, pa.array(values, kind))

    return {
        "episode_id": ids,
        "sequence_index": 0,
        "token_ids": each(_prompts(count) + draw.integers(0, 2, count * TOKENS), pa.int32()),
        "response_mask": each(np.tile(np.arange(TOKENS) % 10 == 0, count).astype(np.int8), pa.int8()),
        "sampled_logprobs": each(np.round(-draw.random(count * TOKENS), 3), pa.float64()),
        "policy_versions": each(np.tile(np.arange(TOKENS) // 50, count), pa.int32()),
        "image_steps": [list(range(STEPS))] * count,
    }


@lru_cache(maxsize=4)
def _prompts(count: int) -> np.ndarray:
    return np.tile(np.random.default_rng(7).integers(0, 150_000, TOKENS), count)


def _steps(ids: Sequence[str], draw: np.random.Generator) -> dict[str, Any]:
    count = len(ids) * STEPS
    said = [" ".join(row) for row in WORDS[draw.integers(0, len(WORDS), (count, 16))]]
    digests = draw.bytes(32 * count).hex()
    return {
        "episode_id": np.repeat(ids, STEPS).tolist(),
        "step_index": np.tile(np.arange(STEPS), len(ids)),
        "task_id": "t",
        "screenshot_sha256": [digests[place : place + 64] for place in range(0, 64 * count, 64)],
        "screenshot_width": 1280, "screenshot_height": 736, "screenshot_format": "png",
        "observation_text": [f"[Task]\nRename the folder to {text}" for text in said], "response_text": said,
        "prompt_num_tokens": 900, "response_num_tokens": 30,
        "action_type": ["left_click", "type", "scroll", "key"] * (count // 4), "action_parsed": True,
        "action_executed": True,
        "model_s": np.round(draw.random(count), 3), "step_s": np.round(draw.random(count), 3),
    }  # fmt: skip


def _groups(run: Run, places: range, rewards: np.ndarray) -> dict[str, Any]:
    starts = range(0, len(places), GROUP)
    shared = [rewards[start : start + GROUP].tolist() for start in starts]
    return {
        "group_id": [run.episode_id(places[start]).rpartition("-")[0] for start in starts],
        "task_id": [_task(places[start] // GROUP) for start in starts],
        "stage_key": run.stage_key, "checkpoint_id": run.checkpoint_id,
        "num_valid": [len(each) for each in shared], "num_successes": [int(sum(each)) for each in shared],
        "task_rewards": shared,
    }  # fmt: skip


def _write(state: StateDir, table: str, file: str, columns: Mapping[str, Any]) -> None:
    """A scalar applies to all rows, and a missing column is NULL. Synthetic data are not synced."""
    schema = stored(table)
    key = KEY_OF[HEAD_OF.get(table, table)]
    count = len(columns[key])
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        values = value if isinstance(value, list | np.ndarray | pa.Array) else [value] * count
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    folder = state.trajectories / table
    folder.mkdir(parents=True, exist_ok=True)
    rows = marked(pa.Table.from_arrays(arrays, names=schema.names).cast(schema))
    (folder / file).write_bytes(parquet_bytes(rows, statistics=(key,)))


def _write_tables(state: StateDir, runs: Sequence[Run]) -> None:
    write_table(state, "union_tasks", [
        {"task_id": _task(number), "domain": "os", "instruction": f"Rename folder {number}"}
        for number in range(NUM_TASKS)
    ])  # fmt: skip
    names = set(read_table(state, "checkpoints")["checkpoint_id"].to_pylist())
    names |= {run.checkpoint_id for run in runs}
    write_table(state, "checkpoints", [
        {"checkpoint_id": name, "stage": "gspo_phase1", "path": f"checkpoints/{name}", "num_updates": PHASE // UPDATE}
        for name in sorted(names)
    ])  # fmt: skip
