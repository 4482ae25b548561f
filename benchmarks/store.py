"""The trajectory store: ten processes that append while a reader queries, and questions over a million steps."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.spread import Spread, print_table, timed_ms, verdict
from benchmarks.store_storm import run_storm
from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import marked, stored
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store.part_files import VERSION_SHIFT
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import open_catalog, run_query

STEPS_AN_EPISODE, EPISODES_A_PART, NUM_FRESH = 10, 64, 200
EPISODE = "gspo_phase1-0123456789ab-u{part:05d}-s{index:02d}"
QUESTIONS: dict[str, tuple[str, float]] = {
    "filter and aggregate over the steps": (
        "SELECT action_type, count(*), avg(step_s) FROM steps WHERE action_executed GROUP BY 1",
        150.0,
    ),
    "one trajectory": ("SELECT * FROM steps WHERE episode_id = '{episode}' ORDER BY step_index", 50.0),
    "the best 3 episodes of each task": (
        "SELECT task_id, episode_id, shaped_reward FROM episodes WHERE is_valid QUALIFY row_number() OVER "
        "(PARTITION BY task_id ORDER BY task_reward DESC, shaped_reward DESC, episode_id) <= 3",
        300.0,
    ),
}
"""SQL, and the limit of the median in milliseconds."""


def run_store(
    console: Console, *, rounds: int, folder: Path, num_steps: int = 1_000_000, seconds: float = 60.0
) -> list[dict[str, Any]]:
    """`folder` is created, and removed at the end; each question is run `rounds` times five times."""
    results: list[dict[str, Any]] = []
    try:
        results += bench_questions(console, rounds=rounds, folder=folder / "steps", num_steps=num_steps)
        results += bench_storm(console, folder=folder / "storm", seconds=seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def bench_storm(console: Console, *, folder: Path, seconds: float) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    sync_ms = time_syncs(folder)
    storm = run_storm(folder, seconds=seconds, num_writers=10, is_rewriting=False, compact_every_s=5.0)
    reads = Spread.of(storm.read_ms)
    rows = [
        ("rows lost, doubled or torn; reads failed", str(len(storm.failures)), f"0: {verdict(not storm.failures)}"),
        ("worst append, s", f"{storm.worst_append_s:.3f}", f"0.5: {verdict(storm.worst_append_s <= 0.5)}"),
        ("appends", f"{storm.num_appends:,}", f"an fsync of 10 kB alone: {sync_ms.quartile_text(1)} ms; 6 an append"),
        ("reads (a join of both views), ms", reads.quartile_text(0), f"{storm.num_reads} reads"),
        ("compactions meanwhile", str(storm.num_compactions), "; ".join(storm.upkeep_failures[:1])),
    ]
    title = f"10 processes append for {seconds:g} s, 5 parts a second each; limited by the disk's fsync"
    print_table(console, title, ("figure", "value", "at most"), rows)
    return [
        {"bench": "store", "figure": "failures", "value": len(storm.failures), "seconds": seconds},
        {"bench": "store", "figure": "worst append", "unit": "s", "value": round(storm.worst_append_s, 4)},
        {"bench": "store", "figure": "read while ten append", "unit": "ms", **reads.fields()},
        {"bench": "store", "figure": "fsync", "unit": "ms", **sync_ms.fields()},
    ]


def time_syncs(folder: Path) -> Spread:
    """Milliseconds to sync a file of 10 kB: the lower bound of an append."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        with (folder / "sync").open("wb") as handle:
            handle.write(bytes(10_000))
            handle.flush()
            os.fsync(handle.fileno())
        times.append((time.perf_counter() - start) * 1e3)
    (folder / "sync").unlink()
    return Spread.of(times)


def bench_questions(console: Console, *, rounds: int, folder: Path, num_steps: int) -> list[dict[str, Any]]:
    state = StateDir(folder)
    num_parts = max(1, num_steps // STEPS_AN_EPISODE // EPISODES_A_PART)
    write_parts(state, 0, num_parts, EPISODES_A_PART)
    start = time.perf_counter()
    done = compact_store(state, min_parts=1, retired_grace_s=0)
    compaction_s = time.perf_counter() - start
    compact_store(state, min_parts=1, retired_grace_s=0)
    rebuild_catalog(state)
    rate = num_parts * EPISODES_A_PART * STEPS_AN_EPISODE / compaction_s
    results: list[dict[str, Any]] = [
        {"bench": "store", "figure": "compaction", "unit": "steps/s", "value": round(rate)}
    ]
    rows = [(f"compaction of {done.num_parts:,} parts", "", f"{compaction_s:.1f} s", f"{rate:,.0f} steps a second")]
    for num_fresh in (0, NUM_FRESH):
        write_parts(state, num_parts, num_fresh, 8)
        for name, (sql, limit) in QUESTIONS.items():
            asked = sql.format(episode=EPISODE.format(part=num_parts // 2, index=7))
            with open_catalog(state) as connection:
                inside = timed_ms(lambda asked=asked, to=connection: to.execute(asked).fetchall(), rounds * 5)
            whole = timed_ms(lambda asked=asked: run_query(state, asked), rounds * 5)
            for kind, spread in (("connection open", inside), ("opening it too", whole)):
                figure = f"{name}, {num_fresh} fresh parts, {kind}"
                results.append({"bench": "store", "figure": figure, "unit": "ms", **spread.fields()})
            is_met = verdict(inside.median <= limit)
            figure = f"{name}, {num_fresh} fresh parts, ms"
            rows.append((figure, inside.quartile_text(0), whole.quartile_text(0), f"p50 {limit:g}: {is_met}"))
    title = f"{num_steps:,} compacted steps and fresh parts; limited by the CPU (footers, decoding)"
    print_table(console, title, ("p50 [p25..p75]", "connection open", "opening it too", "at most"), rows)
    return results


def write_parts(state: StateDir, first: int, num_parts: int, num_episodes: int) -> None:
    """Write parts in the store's format, made column by column."""
    rng = np.random.default_rng(first)
    for part in range(first, first + num_parts):
        name = f"gspo_phase1-0123456789ab-u{part:05d}"
        version = (1_700_000_000_000 + part) << VERSION_SHIFT
        ids = [EPISODE.format(part=part, index=index) for index in range(num_episodes)]
        file = f"{name}~{version:016x}-000000.parquet"
        book = {"part": name, "part_version": version}
        for table, rows in (
            ("steps", _step_columns(ids, part, rng)),
            ("sequences", _sequence_columns(ids, part, rng)),
            ("episodes", _episode_columns(ids, part, rng)),
        ):
            write_parquet(
                state.trajectories / table / file, marked(_filled(table, rows | book)), statistics=("episode_id",)
            )


def _episode_columns(ids: list[str], part: int, rng: np.random.Generator) -> dict[str, Any]:
    count = len(ids)
    return {
        "episode_id": ids,
        "task_id": [f"desktop-basics-rename_folder-{(part * count + index) // 8 % 400:04d}" for index in range(count)],
        "purpose": "train", "checkpoint_id": "gspo_phase1-0123456789ab", "outcome": "failure", "is_valid": True,
        "is_success": False, "task_reward": 0.0, "shaped_reward": rng.random(count), "num_steps": STEPS_AN_EPISODE,
        "started_at": rng.random(count) * 1e9, "context_mode": "append",
    }  # fmt: skip


def _sequence_columns(ids: list[str], part: int, rng: np.random.Generator) -> dict[str, Any]:
    count = len(ids)
    return {
        "episode_id": ids, "sequence_index": 0,
        "token_ids": [rng.integers(0, 150_000, 400).tolist() for _ in range(count)],
        "response_mask": [[0, 1] * 200] * count,
        "sampled_logprobs": [np.round(rng.random(400), 4).tolist() for _ in range(count)],
        "policy_versions": [[-1, part] * 200] * count,
        "image_steps": [list(range(STEPS_AN_EPISODE))] * count,
    }  # fmt: skip


def _step_columns(ids: list[str], part: int, rng: np.random.Generator) -> dict[str, Any]:
    count = len(ids) * STEPS_AN_EPISODE
    return {
        "episode_id": [name for name in ids for _ in range(STEPS_AN_EPISODE)],
        "step_index": list(range(STEPS_AN_EPISODE)) * len(ids),
        "task_id": "t", "checkpoint_id": "gspo_phase1-0123456789ab", "purpose": "train", "update": part,
        "screenshot_sha256": [rng.bytes(32).hex() for _ in range(count)],
        "observation_text": [f"[Task]\nRename the folder {number} {rng.bytes(60).hex()}" for number in range(count)],
        "response_text": [f"Action: click {number}\n<tool_call>{rng.bytes(20).hex()}" for number in range(count)],
        "action_type": [("left_click", "type", "scroll")[number % 3] for number in range(count)],
        "action_executed": [number % 5 != 0 for number in range(count)],
        "model_s": rng.random(count), "step_s": rng.random(count),
    }  # fmt: skip


def _filled(table: str, columns: dict[str, Any]) -> pa.Table:
    """A scalar applies to all rows, and a missing column is NULL."""
    count = len(columns["episode_id"])
    arrays = []
    for field in stored(table):
        value = columns.get(field.name)
        values = value if isinstance(value, list | np.ndarray) else [value] * count
        arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=stored(table))


if __name__ == "__main__":
    run_store(
        Console(width=150), rounds=3, folder=Path(sys.argv[1]), num_steps=int(sys.argv[2]), seconds=float(sys.argv[3])
    )
