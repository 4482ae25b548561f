"""Cost of questions, look-ups, replay and garbage collection as a state grows, and an extrapolation to a million
episodes. `python -m benchmarks.growth JOB FOLDER` runs one of `JOBS` there and prints its time and peak memory."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
from rich.console import Console

from benchmarks.grown_state import Run, write_state
from benchmarks.spread import Spread, print_table, timed_ms
from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.compaction import exclusive, remove_retired
from osworld_pipeline.store.merging import MERGE_PARTS, merge_parts
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import open_catalog
from osworld_pipeline.tables.replay.candidates import ReplayCandidates
from osworld_pipeline.web.reports.report import write_report

TARGET = 1_000_000
SHARES = (16, 4, 1)
"""The state is measured at its size divided by each of these."""
QUESTIONS = {
    "one episode by id": "SELECT * FROM episodes WHERE episode_id = '{episode}'",
    "its steps": "SELECT * FROM steps WHERE episode_id = '{episode}' ORDER BY step_index",
    "outcomes by purpose": "SELECT purpose, outcome, count(*), avg(task_reward) FROM episodes GROUP BY ALL",
    "actions by type": "SELECT action_type, count(*), avg(step_s) FROM steps GROUP BY ALL",
    "evals: success by checkpoint": "SELECT checkpoint_id, avg(success::INT) FROM evals GROUP BY 1",
    "evals: tokens by checkpoint": "SELECT checkpoint_id, sum(prompt_tokens) FROM evals GROUP BY 1",
}
JOBS: Mapping[str, Callable[[StateDir], object]] = {
    "garbage collection": lambda state: collect_garbage(state, is_dry_run=True),
    "report of all evaluations": write_report,
}
"""Each runs in a process of its own, for its peak memory."""


@dataclass
class Growth:
    sizes: list[int] = field(default_factory=list)
    figures: dict[str, list[Spread]] = field(default_factory=dict)
    """One spread for each size, by name."""

    def add(self, name: str, spread: Spread) -> None:
        self.figures.setdefault(name, []).append(spread)


def run_growth(console: Console, *, rounds: int, folder: Path, num_episodes: int) -> list[dict[str, Any]]:
    """`folder` is created, and removed at the end."""
    state, growth, runs = StateDir(folder), Growth(), list[Run]()
    try:
        for share in SHARES:
            size = num_episodes // share
            runs += grow(state, (growth.sizes or [0])[-1], size)
            growth.sizes.append(size)
            measure(state, runs, growth, rounds=rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [(name, *(one.quartile_text(1) for one in found), _guess(growth, found)) for name, found in
            growth.figures.items()]  # fmt: skip
    columns = (
        "ms unless another unit is given",
        *(f"{size:,} episodes" for size in growth.sizes),
        f"{TARGET:,}, extrapolated",
    )
    title = "20 steps and 1,000 tokens an episode; extrapolated from the growth between the last two sizes"
    print_table(console, title, columns, rows)
    return [
        {"bench": "growth", "figure": name, "episodes": size, **spread.fields()}
        for name, found in growth.figures.items()
        for size, spread in zip(growth.sizes, found, strict=True)
    ]


def grow(state: StateDir, before: int, size: int) -> list[Run]:
    """Grow to `size` episodes: the last ones as separate parts, too few for a merge; the rest as left by automatic
    compaction. A state of this size is the work of weeks, so the files that its compactions retired are deleted."""
    num_fresh = min(MERGE_PARTS - 1, (size - before) // 2)
    runs = write_state(state, size - before - num_fresh, first=before)
    while (done := merge_parts(state.trajectories)) is not None and done.num_written:
        pass
    with exclusive(state.trajectories):
        remove_retired(state.trajectories, grace_s=0)
    runs += write_state(state, num_fresh, first=size - num_fresh, is_batched=False)
    rebuild_catalog(state)
    return runs


def measure(state: StateDir, runs: Sequence[Run], growth: Growth, *, rounds: int) -> None:
    episode = runs[len(runs) // 2].episode_id(0)
    with open_catalog(state) as ours, duckdb.connect(str(state.catalog), read_only=True) as plain:
        for name, sql in QUESTIONS.items():
            asked = sql.format(episode=episode)
            growth.add(name, timed_ms(lambda asked=asked: ours.execute(asked).fetchall(), rounds * 3))
        asked = QUESTIONS["one episode by id"].format(episode=episode)
        growth.add("the same, plain client", timed_ms(lambda: plain.execute(asked).fetchall(), rounds * 3))
    store = TrajectoryStore(state)
    growth.add("the same, find_episode", timed_ms(lambda: store.find_episode(episode), rounds * 3))
    for name, spread in time_replay(state, runs).items():
        growth.add(name, spread)
    root = Path(__file__).resolve().parents[1]
    for job in JOBS:
        command = [sys.executable, "-m", "benchmarks.growth", job, str(state.root)]
        used = json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
        growth.add(f"{job}, s", Spread.of([used["s"]]))
        growth.add(f"{job}, peak MB", Spread.of([used["mb"]]))


def time_replay(state: StateDir, runs: Sequence[Run]) -> Mapping[str, Spread]:
    """The first query of a stage that descends from all others, and the query after one more update."""
    stages = [run.stage_key for run in runs if run.is_training]
    lineage = [Ancestor(name, None) for name in stages[:-1]]
    section = ReplaySection(include_online=True)
    candidates = ReplayCandidates(state, section, stage_key=stages[-1], lineage=lineage)
    try:
        first = timed_ms(lambda: candidates.look(1), 1)
        write_state(state, 64, first=TARGET + len(runs), is_batched=True)
        return {"replay, first look": first, "replay, each later update": timed_ms(lambda: candidates.look(2), 1)}
    finally:
        candidates.close()


def _guess(growth: Growth, found: Sequence[Spread]) -> str:
    """Extrapolated by the power law through the last two sizes, with an exponent of at least 0."""
    before, last = (max(one.median, 1e-6) for one in found[-2:])
    power = max(0.0, math.log(last / before) / math.log(growth.sizes[-1] / growth.sizes[-2]))
    return f"{last * (TARGET / growth.sizes[-1]) ** power:,.0f}"


def main(job: str, folder: Path) -> None:
    start = time.perf_counter()
    JOBS[job](StateDir(folder))
    took_s = time.perf_counter() - start
    # Not getrusage: its peak includes the process before it executed this program.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(json.dumps({"s": took_s, "mb": int(peak.split()[1]) * 1024 / 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
