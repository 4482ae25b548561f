"""A backfill of twelve checkpoints on two suites, killed at random moments: in the end every episode was recorded once,
and what was recorded before a kill was not run again.

`make test-faults` runs it.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_samples import make_checkpoint
from launches import wait_for_no_process

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.checkpoints.ids import CARD, checkpoint_card, recipe_suite
from osworld_pipeline.runs.evaluate.plan import load_suite, plan_evaluation
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

ROOT = Path(__file__).resolve().parents[2]
RECIPE = load_recipe("smoke", settings=["agent.max_response_tokens=8"])
SUITES = ("heldout", "mine")
NUM_CHECKPOINTS = 12
NUM_KILLS = 6
KILL_AFTER_EPISODES = (0, 5)
"""New ones; and up to so many seconds more:"""
KILL_DELAY_S = 3.0
LIMIT_S = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.desktop,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif("OSWORLD_CHAOS_KILLS" not in os.environ, reason="takes minutes: make test-faults"),
]


def lay_out(folder: Path) -> StateDir:
    """Writes twelve checkpoints with the same weights, a suite of the user's, and the instance's settings."""
    shutil.copy(ROOT / "dagster.yaml", folder)
    state = StateDir(folder / "var")
    job = StageJob(recipe=RECIPE, state_root=state.root, stage=Stage.BASE, checkpoint_id="base-1", data_digest="d")
    make_base.main(job, lambda message: None)
    for number in range(NUM_CHECKPOINTS):
        checkpoint = make_checkpoint(f"sft-1-u{number:04d}", num_updates=number)
        copied = state.root / checkpoint.path
        shutil.copytree(state.checkpoints / "base-1", copied, copy_function=os.link)
        (copied / CARD).unlink()
        (copied / CARD).write_text(json.dumps(checkpoint_card(checkpoint)))
    shutil.rmtree(state.checkpoints / "base-1")
    state.suites.mkdir()
    task = recipe_suite(RECIPE).train[0].task
    (state.suites / "mine.json").write_text(json.dumps([dict(task.config)]))
    return state


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "osworld_pipeline.cli", "backfill", "--recipe", "smoke",
        "--set", "agent.max_response_tokens=8", "--suites", ",".join(SUITES),
    ]  # fmt: skip
    with (folder / "backfill.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "DAGSTER_HOME": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_episodes(state: StateDir, backfill: subprocess.Popen[bytes], number: int) -> None:
    """Waits until `number` episodes are recorded or the backfill has ended."""
    deadline = time.monotonic() + LIMIT_S
    while backfill.poll() is None and len(recorded(state)) < number:
        assert time.monotonic() < deadline, f"no {number} episodes within {LIMIT_S} s"
        time.sleep(0.5)


def recorded(state: StateDir) -> dict[str, float]:
    """The start time of each recorded episode. The catalog of a killed backfill may be outdated or missing."""
    rebuild_catalog(state)
    rows = run_query(state, "SELECT episode_id, started_at FROM episodes WHERE is_valid").rows
    assert len({episode_id for episode_id, _ in rows}) == len(rows), "an episode is there twice"
    return dict(rows)


def test_backfill_of_twelve_checkpoints_killed_at_random_runs_nothing_twice_and_misses_nothing(tmp_path: Path) -> None:
    state = lay_out(tmp_path)
    seed = int(os.environ.get("OSWORLD_CHAOS_SEED", random.randrange(10**6)))
    rng = random.Random(seed)
    before: dict[str, float] = {}
    for _ in range(NUM_KILLS):
        backfill = start(tmp_path)
        wait_for_episodes(state, backfill, len(before) + rng.randint(*KILL_AFTER_EPISODES))
        time.sleep(rng.uniform(0.0, KILL_DELAY_S))
        backfill.kill()
        backfill.wait(10)
        left = wait_for_no_process(tmp_path, limit_s=25)
        assert not left, f"seed {seed}: a killed backfill left {left}"
        now = recorded(state)
        assert before.items() <= now.items(), f"seed {seed}: what was recorded was run again"
        print(f"{len(now)} episodes after a kill")
        before = now
    backfill = start(tmp_path)
    assert backfill.wait(LIMIT_S) == 0, f"seed {seed}: {(tmp_path / 'backfill.log').read_text()[-3000:]}"
    after = recorded(state)
    assert before.items() <= after.items(), f"seed {seed}: what was recorded was run again"
    suites = [load_suite(state, RECIPE, name) for name in SUITES]
    planned = {
        part
        for number in range(NUM_CHECKPOINTS)
        for suite in suites
        for part in plan_evaluation(RECIPE, f"sft-1-u{number:04d}", suite=suite).episodes
    }
    assert after.keys() == planned
    stages = run_query(state, "SELECT stage, count(DISTINCT checkpoint_id) FROM evals GROUP BY ALL").rows
    assert stages == [(str(Stage.SFT), NUM_CHECKPOINTS)]
