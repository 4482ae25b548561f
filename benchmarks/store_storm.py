"""Many processes append to a trajectory store, write parts again, compact and collect, while a reader checks that
every row exists once. `python -m benchmarks.store_storm FOLDER NUMBER SECONDS PACE_S IS_REWRITING` is one writer."""

import json
import mmap
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
    TokenSequence,
)
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError, StoreBusyError
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

EPISODES_A_PART, ACKS, MAX_WRITERS = 3, "acks", 64
# One query over both views, which counts episodes without exactly their steps and steps without their episode.
QUESTION = """
WITH s AS (SELECT episode_id, count(*) AS n, count(DISTINCT step_index) AS d FROM steps GROUP BY 1)
SELECT count(e.episode_id), count(DISTINCT e.episode_id),
       count(*) FILTER (e.num_steps IS DISTINCT FROM coalesce(s.n, 0) OR s.n IS DISTINCT FROM s.d)
FROM episodes e FULL JOIN s ON s.episode_id = e.episode_id
"""


def storm_episode(episode_id: str, num_steps: int) -> Episode:
    steps = tuple(
        Step(
            step_index=index, screenshot_sha256="0" * 64, screenshot_width=512, screenshot_height=320,
            screenshot_format="png", screenshot_num_bytes=4096, observation_text="Task: rename alpha",
            response_text=f"Action: click {index}", action={"action": "left_click", "coordinate": [1, 2]},
            command="pyautogui.click(1, 2)", policy_version=1, prompt_num_tokens=300, response_num_tokens=20,
            model_s=0.2, step_s=0.4,
            signals=StepSignals(action_type="left_click", action_parsed=True, action_executed=True),
        )
        for index in range(num_steps)
    )  # fmt: skip
    return Episode(
        episode_id=episode_id, task_id=f"t{hash(episode_id) % 50}", task_digest="d", purpose=EpisodePurpose.TRAIN,
        checkpoint_id="c", engine="none", sampling=SamplingParams(temperature=0.8), outcome=Outcome.SUCCESS,
        reward=Reward(task=1.0, shaped=1.0), steps=steps,
        sequences=(
            TokenSequence(
                token_ids=(1, 2, 3), response_mask=(0, 1, 1), sampled_logprobs=(0.0, -0.5, -0.25),
                policy_versions=(-1, 1, 1), image_steps=tuple(range(num_steps)),
            ),
        ),
    )  # fmt: skip


def write_for(folder: Path, number: int, seconds: float, pace_s: float, *, is_rewriting: bool) -> dict[str, float]:
    """Append parts, sometimes write an old one again with other steps; publishes the number of parts after each."""
    store = TrajectoryStore(StateDir(folder))
    rng = random.Random(number)
    worst_s, num_parts, num_appends = 0.0, 0, 0
    with (folder / ACKS).open("r+b") as handle, mmap.mmap(handle.fileno(), MAX_WRITERS * 8) as acks:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_new = not (is_rewriting and num_parts and rng.random() < 0.3)
            part = f"w{number:02d}-{num_parts if is_new else rng.randrange(num_parts):05d}"
            episodes = [storm_episode(f"{part}-e{index}", rng.randint(1, 4)) for index in range(EPISODES_A_PART)]
            start = time.perf_counter()
            store.write_episodes(part, episodes)
            took_s = time.perf_counter() - start
            worst_s = max(worst_s, took_s)
            num_appends += 1
            num_parts += is_new
            acks[number * 8 : number * 8 + 8] = num_parts.to_bytes(8, "little")
            time.sleep(max(0.0, pace_s - took_s))
    return {"worst_s": worst_s, "num_parts": num_parts, "num_appends": num_appends}


@dataclass
class Storm:
    """Results, updated while it runs."""

    num_reads: int = 0
    failures: list[str] = field(default_factory=list)
    """Reads that failed, or saw rows lost, doubled or torn."""
    read_ms: list[float] = field(default_factory=list)
    worst_append_s: float = 0.0
    num_appends: int = 0
    num_parts: int = 0
    num_compactions: int = 0
    upkeep_failures: list[str] = field(default_factory=list)


def run_storm(
    folder: Path,
    *,
    seconds: float,
    num_writers: int,
    pace_s: float = 0.2,
    is_rewriting: bool = True,
    compact_every_s: float | None = 1.0,
    retired_grace_s: float = 5.0,
    read_every_s: float = 0.1,
) -> Storm:
    """Run the writers, the reader and the upkeep in `folder`, which is a separate state folder."""
    state = StateDir(folder)
    rebuild_catalog(state)
    (folder / ACKS).write_bytes(bytes(MAX_WRITERS * 8))
    storm = Storm()
    ended = threading.Event()
    threads = [threading.Thread(target=_read, args=(state, storm, ended, read_every_s))]
    if compact_every_s is not None:
        threads.append(threading.Thread(target=_keep_up, args=(state, storm, ended, compact_every_s, retired_grace_s)))
    command = [sys.executable, "-m", "benchmarks.store_storm", str(folder)]
    root = Path(__file__).resolve().parents[1]
    writers = [
        subprocess.Popen(
            [*command, str(number), str(seconds), str(pace_s), str(int(is_rewriting))],
            stdout=subprocess.PIPE, text=True, cwd=root,
        )
        for number in range(num_writers)
    ]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        for writer in writers:
            out, _ = writer.communicate(timeout=seconds + 120)
            written = json.loads(out)
            storm.worst_append_s = max(storm.worst_append_s, written["worst_s"])
            storm.num_appends += written["num_appends"]
            storm.num_parts += written["num_parts"]
    finally:
        ended.set()
        for writer in writers:
            writer.kill()
            writer.wait()
        for thread in threads:
            thread.join()
    _look(state, storm, folder / ACKS)
    counted = run_query(state, "SELECT count(*) FROM episodes").rows[0][0]
    if counted != storm.num_parts * EPISODES_A_PART:
        storm.failures.append(f"{counted} episodes at the end, not {storm.num_parts * EPISODES_A_PART}")
    return storm


def _read(state: StateDir, storm: Storm, ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        _look(state, storm, state.root / ACKS)


def _look(state: StateDir, storm: Storm, acks: Path) -> None:
    data = acks.read_bytes()
    known = sum(int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8))
    start = time.perf_counter()
    try:
        num, num_distinct, num_torn = run_query(state, QUESTION).rows[0]
    except PipelineError as error:
        storm.failures.append(f"a read failed: {error}")
        return
    storm.read_ms.append((time.perf_counter() - start) * 1e3)
    storm.num_reads += 1
    if num < known * EPISODES_A_PART:
        storm.failures.append(f"{num} episodes seen where {known * EPISODES_A_PART} were stored before")
    if num != num_distinct:
        storm.failures.append(f"{num - num_distinct} episodes seen twice")
    if num_torn:
        storm.failures.append(f"{num_torn} episodes without exactly their steps")


def _keep_up(state: StateDir, storm: Storm, ended: threading.Event, every_s: float, grace_s: float) -> None:
    while not ended.wait(every_s):
        try:
            compact_store(state, min_parts=2, target_bytes=200_000, retired_grace_s=grace_s)
            collect_garbage(state, retired_grace_s=grace_s)
            storm.num_compactions += 1
        except StoreBusyError:
            continue  # a writer merges; `num_compactions` shows whether the lock was ever free
        except PipelineError as error:
            storm.upkeep_failures.append(str(error))


def main(arguments: Sequence[str], write: Callable[[str], None] = print) -> None:
    folder, number, seconds, pace_s, is_rewriting = arguments
    done = write_for(Path(folder), int(number), float(seconds), float(pace_s), is_rewriting=is_rewriting == "1")
    write(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1:])
