"""A large synthetic store for the viewer's benchmark: the real columns in real parts, compacted by the real compaction,
and fresh parts. Many steps share a screenshot."""

import io
import random
import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import conform, marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.store.part_files import VERSION_SHIFT
from osworld_pipeline.tables.owned import write_table

NUM_TASKS, NUM_IMAGES, STEPS_AN_EPISODE, TOKENS_AN_EPISODE = 369, 24, 4, 64
LARGE_PART, SMALL_PART, NUM_SMALL = 4_000, 8, 200
SIZE = (1280, 736)
STAGES = ("sft", "gspo_phase1", "gspo_phase2")
OUTCOMES = ("success", "failure", "truncated", "timeout", "env_fault", "policy_fault")
FAMILIES = ("rename_folder", "click_button", "type_text", "close_window", "sort_list")
WORDS = (
    "open", "the", "folder", "click", "save", "type", "rename", "window", "button", "list", "scroll", "wait", "menu",
    "file", "edit", "terminal", "find", "press",
)  # fmt: skip


def write_store(
    folder: Path, *, num_episodes: int, is_compacted: bool = True, num_images: int = NUM_IMAGES
) -> StateDir:
    """Write `num_episodes` episodes, the last of them in small fresh parts."""
    state = StateDir(folder)
    rng = random.Random(0)
    blobs = BlobStore(state.blobs)
    images = [blobs.write(draw_screen(number), suffix="png") for number in range(num_images)]
    tasks = [f"desktop-basics-{FAMILIES[number % len(FAMILIES)]}-{number:04d}" for number in range(NUM_TASKS)]
    write_table(state, "union_tasks", [
        {"task_id": task, "domain": FAMILIES[number % 3], "instruction": " ".join(rng.choices(WORDS, k=9))}
        for number, task in enumerate(tasks)
    ])  # fmt: skip
    checkpoints = [f"{stage}-{number:012x}" for stage in STAGES for number in range(12)]
    write_table(state, "checkpoints", [
        {"checkpoint_id": name, "stage": name.rpartition("-")[0], "path": f"checkpoints/{name}", "num_updates": 100}
        for name in checkpoints
    ])  # fmt: skip
    num_fresh = min(NUM_SMALL * SMALL_PART, num_episodes // 2) if is_compacted else num_episodes
    at = 0
    while at < num_episodes - num_fresh:
        count = min(LARGE_PART, num_episodes - num_fresh - at)
        write_part(state, at, count, tasks, checkpoints, images)
        at += count
    if is_compacted:
        compact_store(state, min_parts=1, retired_grace_s=0)
        compact_store(state, min_parts=1, retired_grace_s=0)
    while at < num_episodes:
        count = min(SMALL_PART, num_episodes - at)
        write_part(state, at, count, tasks, checkpoints, images)
        at += count
    return state


def write_part(
    state: StateDir, first: int, count: int, tasks: list[str], checkpoints: list[str], images: list[str]
) -> None:
    """Write the episodes from number `first` on as one part, like a writer."""
    part = f"bench-{first:07d}"
    version = (1_790_000_000_000 + first) << VERSION_SHIFT
    name = f"{part}~{version:016x}-{secrets.token_hex(3)}.parquet"
    draw = np.random.default_rng(first)
    numbers = np.arange(first, first + count)
    ids = [f"bench-u{number // 8:06d}-s{number % 8:02d}-{number:07d}" for number in numbers]
    played = [checkpoints[place] for place in draw.integers(0, len(checkpoints), count)]
    outcomes = [OUTCOMES[place] for place in draw.choice(len(OUTCOMES), count, p=(0.4, 0.3, 0.2, 0.04, 0.04, 0.02))]
    is_valid = np.isin(outcomes, OUTCOMES[:3])
    rewards = np.where(is_valid, (np.array(outcomes) == "success") * 1.0, np.nan)
    shaped = np.where(is_valid, np.round(draw.random(count), 3), np.nan)
    is_train = draw.random(count) < 0.7
    rows = list(zip(numbers, played, is_train, is_valid, strict=True))
    heads = pa.table({
        "episode_id": ids,
        "task_id": [tasks[place] for place in draw.integers(0, len(tasks), count)],
        "purpose": np.where(is_train, "train", "evaluate").tolist(),
        "checkpoint_id": played,
        "stage_key": [name if train else f"eval-{name}-0123456789ab" for _, name, train, _ in rows],
        "update": pa.array(np.where(is_train, numbers // 80, -1), pa.int32()),
        "group_id": [f"group-{number // 8:06d}" if train else None for number, _, train, _ in rows],
        "seed": pa.array(numbers % 8, pa.int64()),
        "attempt": pa.array(np.zeros(count), pa.int32()),
        "outcome": outcomes,
        "error": [None if valid else f"replica local-{number % 64} fell silent" for number, _, _, valid in rows],
        "is_valid": is_valid,
        "is_success": np.array(outcomes) == "success",
        "task_reward": pa.array(rewards, from_pandas=True),
        "shaped_reward": pa.array(shaped, from_pandas=True),
        "num_steps": pa.array(np.full(count, STEPS_AN_EPISODE), pa.int32()),
        "max_turns": pa.array(np.full(count, 15), pa.int32()),
        "engine": ["sglang"] * count,
        "provider": ["qemu"] * count,
        "temperature": np.full(count, 0.8),
        "started_at": 1_790_000_000.0 + numbers * 3.0,
        "part": [part] * count,
        "part_version": pa.array(np.full(count, version), pa.int64()),
    })  # fmt: skip
    num_steps = count * STEPS_AN_EPISODE
    places = np.column_stack((draw.integers(0, SIZE[0], num_steps), draw.integers(0, SIZE[1], num_steps)))
    said = [" ".join(WORDS[place] for place in row) for row in draw.integers(0, len(WORDS), (num_steps, 16))]
    steps = pa.table({
        "episode_id": np.repeat(ids, STEPS_AN_EPISODE).tolist(),
        "step_index": pa.array(np.tile(np.arange(STEPS_AN_EPISODE), count), pa.int32()),
        "screenshot_sha256": [images[place] for place in draw.integers(0, len(images), num_steps)],
        "screenshot_width": pa.array(np.full(num_steps, SIZE[0]), pa.int32()),
        "screenshot_height": pa.array(np.full(num_steps, SIZE[1]), pa.int32()),
        "screenshot_format": ["png"] * num_steps,
        "observation_text": ["Task: do it"] * num_steps,
        "response_text": said,
        "action": [f'{{"action":"left_click","coordinate":[{x},{y}]}}' for x, y in places],
        "command": [f"pyautogui.click({x}, {y})" for x, y in places],
        "model_s": np.round(draw.random(num_steps) * 3, 3),
        "step_s": np.round(draw.random(num_steps), 3),
        "action_type": ["left_click"] * num_steps,
        "action_parsed": draw.random(num_steps) < 0.95,
        "action_executed": np.full(num_steps, True),
        "part": [part] * num_steps,
        "part_version": pa.array(np.full(num_steps, version), pa.int64()),
    })  # fmt: skip
    tokens = pa.array(draw.integers(0, 150_000, count * TOKENS_AN_EPISODE), pa.int32())
    lists = pa.array(np.arange(0, (count + 1) * TOKENS_AN_EPISODE, TOKENS_AN_EPISODE), pa.int32())
    sequences = pa.table({
        "episode_id": ids,
        "sequence_index": pa.array(np.zeros(count), pa.int32()),
        "token_ids": pa.ListArray.from_arrays(lists, tokens),
        "part": [part] * count,
        "part_version": pa.array(np.full(count, version), pa.int64()),
    })  # fmt: skip
    for table, rows in (("steps", steps), ("sequences", sequences), ("episodes", heads)):
        write_parquet(state.trajectories / table / name, marked(conform(rows, stored(table))))


def draw_screen(number: int) -> bytes:
    """A picture as large as a real screenshot, and about as hard to compress."""
    rng = random.Random(number)
    image = Image.new("RGB", SIZE, (rng.randrange(256), 90, 120))
    draw = ImageDraw.Draw(image)
    for _ in range(400):
        left, top = rng.randrange(SIZE[0]), rng.randrange(SIZE[1])
        draw.rectangle((left, top, left + rng.randrange(120), top + rng.randrange(60)),
                       fill=tuple(rng.randrange(256) for _ in range(3)))  # fmt: skip
        draw.text((left, top), " ".join(rng.choices(WORDS, k=6)), fill=(255, 255, 255))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
