"""The whole pipeline at small scale, killed at random moments: it must end in the same state, with no duplicates.

`make test-faults` kills it more often, runs it once more when it is done, and continues training from a folder.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launches import wait_for_no_process

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.questions.cookbook import COOKBOOK

ROOT = Path(__file__).resolve().parents[2]
RECIPE = load_recipe("smoke")
IS_LONG = "OSWORLD_CHAOS_KILLS" in os.environ
NUM_KILLS = 4 if IS_LONG else 1
KILL_AFTER_S = (4.0, 20.0)
DEMO_LIMIT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.desktop, pytest.mark.timeout(2400)]


def start_demo(folder: Path) -> subprocess.Popen[str]:
    """`osworld-pipeline demo` in a folder of its own, with the project's instance settings."""
    shutil.copy(ROOT / "dagster.yaml", folder)
    command = [sys.executable, "-m", "osworld_pipeline.cli", "demo", "--recipe", "smoke"]
    with (folder / "demo.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def check_training_from_a_folder(folder: Path, state: StateDir) -> None:
    """One stage trains a checkpoint from elsewhere, without SFT, and both are evaluated."""
    sft = next((folder / "var/checkpoints").glob("sft-*/model.safetensors")).parent
    elsewhere = folder / "elsewhere"
    shutil.copytree(sft, elsewhere, ignore=shutil.ignore_patterns("checkpoint.json", "manifest.json"))
    done = subprocess.run(
        [
            sys.executable, "-m", "osworld_pipeline.cli", "train", "--recipe", "smoke", "--from", str(elsewhere),
            "--stages", "gspo_phase1", "--set", "gspo.phase1.num_updates=1",
        ],
        cwd=folder, capture_output=True, text=True, timeout=DEMO_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = rows(
        state,
        "SELECT made.num_updates, start.stage, count(DISTINCT evals.checkpoint_id) FROM checkpoints AS made "
        "JOIN checkpoints AS start ON start.checkpoint_id = made.parent_id "
        "JOIN evals ON evals.checkpoint_id IN (made.checkpoint_id, start.checkpoint_id) "
        "WHERE start.stage = 'external' GROUP BY ALL",
    )
    assert made == [(1, "external", 2)]


def rows(state: StateDir, sql: str) -> list[tuple]:
    return run_query(state, sql).rows


def test_demo_killed_at_random_ends_in_the_same_state_without_duplicates(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(NUM_KILLS):
        demo = start_demo(tmp_path)
        try:
            demo.wait(rng.uniform(*KILL_AFTER_S))
        except subprocess.TimeoutExpired:
            os.kill(demo.pid, signal.SIGKILL)
            demo.wait(10)
        left = wait_for_no_process(tmp_path, limit_s=25)
        assert not left, f"seed {seed}: a killed demo left {left}"

    demo = start_demo(tmp_path)
    try:
        status = demo.wait(DEMO_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(demo.pid, signal.SIGKILL)
        pytest.fail(
            f"seed {seed}: the demo did not end in {DEMO_LIMIT_S} s: {(tmp_path / 'demo.log').read_text()[-2000:]}"
        )
    assert status == 0, f"seed {seed}: {(tmp_path / 'demo.log').read_text()[-3000:]}"
    check_state(state)

    if IS_LONG:
        before = snapshot(state)
        again = start_demo(tmp_path)
        assert again.wait(DEMO_LIMIT_S) == 0
        assert snapshot(state) == before, "a second run of a finished demo changed something"
        check_training_from_a_folder(tmp_path, state)
    assert not wait_for_no_process(tmp_path, limit_s=25)
    check_cookbook(state)


def snapshot(state: StateDir) -> str:
    """Keys of every view and every file of the state that a rerun must not touch."""
    queries = {
        "checkpoints": "SELECT checkpoint_id, weights_digest FROM checkpoints ORDER BY ALL",
        "episodes": "SELECT episode_id FROM episodes ORDER BY ALL",
        "steps": "SELECT episode_id, step_index FROM steps ORDER BY ALL",
        "updates": 'SELECT stage_key, "update", loss FROM updates ORDER BY ALL',
        "attempts": "SELECT attempt_id, status FROM stage_attempts ORDER BY ALL",
        "groups": "SELECT group_id FROM rollout_groups ORDER BY ALL",
        "injections": "SELECT injection_id FROM injections ORDER BY ALL",
        "evals": "SELECT checkpoint_id, task_id, seed, outcome FROM evals ORDER BY ALL",
        "verifications": "SELECT verification_id FROM replay_verifications ORDER BY ALL",
        "replay": "SELECT row_id FROM replay ORDER BY ALL",
        "tasks": "SELECT task_id FROM tasks ORDER BY ALL",
    }
    return json.dumps({name: rows(state, sql) for name, sql in queries.items()}, default=str)


def check_cookbook(state: StateDir) -> None:
    """Every query runs on a finished demo, and most return rows there, independent of what the policy learned."""
    answers = {question.name: len(rows(state, question.sql)) for question in COOKBOOK}
    without = {name for name, number in answers.items() if number == 0}
    assert without <= {
        "fell-between-checkpoints", "held-updates", "running-stages", "solved-only-with-replay", "superseded-rollouts",
        "tasks-never-tried",
    }, answers  # fmt: skip
    assert answers["running-stages"] == answers["superseded-rollouts"] == 0


def check_state(state: StateDir) -> None:
    num_families = len(RECIPE.suite.families)
    stages = [row[0] for row in rows(state, "SELECT stage FROM checkpoints ORDER BY stage")]
    assert stages == ["base", "gspo_phase1", "gspo_phase2", "sft"]

    num_heldout = num_families * RECIPE.suite.num_heldout
    evals = rows(state, "SELECT checkpoint_id, count(*), count(DISTINCT (task_id, seed)) FROM evals GROUP BY 1")
    assert len(evals) == 4
    assert {(row[1], row[2]) for row in evals} == {(num_heldout, num_heldout)}

    planned = {
        "sft": RECIPE.sft.num_updates,
        "gspo_phase1": RECIPE.gspo.phase1.num_updates,
        "gspo_phase2": RECIPE.gspo.phase2.num_updates,
    }
    sql = 'SELECT stage, "update" FROM updates ORDER BY ALL'
    assert rows(state, sql) == sorted((stage, n + 1) for stage, num in planned.items() for n in range(num))
    sql = "SELECT stage, status, num_updates, num_planned FROM stages ORDER BY ALL"
    assert rows(state, sql) == sorted((stage, "finished", num, num) for stage, num in planned.items())
    updates = RECIPE.gspo.phase1.num_updates + RECIPE.gspo.phase2.num_updates
    num_groups = updates * RECIPE.gspo.tasks_per_update
    assert rows(state, "SELECT count(*), count(DISTINCT group_id) FROM rollout_groups") == [(num_groups, num_groups)]
    num_episodes = num_groups * RECIPE.gspo.group_size
    sql = "SELECT count(*), count(DISTINCT episode_id) FROM episodes WHERE purpose = 'train'"
    assert rows(state, sql) == [(num_episodes, num_episodes)]

    assert rows(state, "SELECT episode_id, step_index FROM steps GROUP BY ALL HAVING count(*) > 1") == []
    assert rows(state, "SELECT count(*) FROM steps s ANTI JOIN episodes e USING (episode_id)") == [(0,)]
    assert rows(state, "SELECT row_id FROM replay GROUP BY 1 HAVING count(*) > 1") == []
    sql = "SELECT verification_id FROM replay_verifications GROUP BY 1 HAVING count(*) > 1"
    assert rows(state, sql) == []
    assert rows(state, "SELECT count(*) > 0 FROM replay_verifications WHERE reward = 1.0") == [(True,)]
    assert rows(state, "SELECT outcome FROM episodes WHERE NOT is_valid AND task_reward IS NOT NULL") == []
    blobs = {path.stem for path in state.blobs.glob("*/*")}
    seen = {row[0] for row in rows(state, "SELECT DISTINCT screenshot_sha256 FROM steps")}
    assert seen <= blobs
    leftovers = [str(path) for path in state.root.rglob("*.tmp*") if "dagster" not in path.parts]
    assert not leftovers
    assert not list(state.checkpoints.glob("*.partial"))
