"""OSWorld result folders as evaluations: rows of `evals` under checkpoints of their own, with the numbers that the
result files hold, and nothing to train on."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode, make_step
from export_samples import picture
from import_samples import OPTIONS, put_attempt, put_task

from osworld_pipeline.datasets.exporters.osworld_results import export_osworld_results
from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
from osworld_pipeline.domain.episode import Episode, Outcome, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.leaderboard import build_leaderboard
from osworld_pipeline.evaluation.scores import EvalRow, read_evals, read_scores
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views

CLICK = "pyautogui.click(3, 4)"
KEY = "00112233aabb"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def import_evaluations(state: StateDir, results: Path) -> list[EvalRow]:
    summary = import_osworld_results(state, results, OPTIONS, as_evaluations=True)
    assert (summary.num_demonstrations, summary.num_rejects) == (0, 0)
    rows = read_evals(state)
    assert summary.num_episodes == len(rows)
    return rows


def put_arguments(results: Path, model: str, arguments: Mapping[str, Any]) -> None:
    (results / "pyautogui" / "screenshot" / model / "args.json").write_text(json.dumps(arguments))


def test_a_model_is_a_checkpoint_of_its_own_and_its_source_is_marked(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    put_attempt(results, "solved", [CLICK, "DONE"], result="0.75\n")
    put_attempt(results, "tried", [CLICK, "DONE"], result="0.25\n")
    rows = import_evaluations(state, results)
    assert [(row.checkpoint_id, row.task_id, row.success, row.reward) for row in rows] == [
        ("theirs-some-model", "solved", True, 0.75),
        ("theirs-some-model", "tried", False, 0.25),
    ]
    assert {(row.source_dataset, row.stage, row.response_tokens, row.wall_s) for row in rows} == {
        ("theirs", None, None, None)
    }
    (score,) = read_scores(state)
    # What OSWorld's own script prints is the mean of the results.
    assert (score.success_rate, score.mean_reward) == (0.5, 0.5)


def test_nothing_of_an_evaluation_is_a_demonstration(state: StateDir, results: Path) -> None:
    put_task(state.osworld_repo, "solved")
    put_attempt(results, "solved", [CLICK, "DONE"])
    import_evaluations(state, results)
    assert (state.imports / "theirs" / "demonstrations.jsonl").read_bytes() == b""
    assert not list((state.imports / "theirs" / "images").iterdir())


def test_an_attempt_without_a_result_is_a_fault_and_a_result_alone_counts(state: StateDir, results: Path) -> None:
    put_attempt(results, "cut", [CLICK], result=None)
    put_attempt(results, "never", [], result=None)
    (put_attempt(results, "alone", [CLICK]) / "traj.jsonl").unlink()
    rows = {row.task_id: row for row in import_evaluations(state, results)}
    assert {task: (row.outcome, row.turns) for task, row in rows.items()} == {
        "cut": ("env_fault", 1),
        "never": ("env_fault", 0),
        "alone": ("success", 0),
    }
    assert "holds no step" in str(rows["never"].error)
    (score,) = read_scores(state)
    assert (score.lenient.value, score.strict.value, score.num_faults) == (1.0, 1 / 3, 2)


def test_models_under_the_same_settings_and_tasks_can_be_compared_and_others_cannot(
    state: StateDir, results: Path
) -> None:
    settings = {"max_steps": 15, "observation_type": "screenshot"}
    for model, budget in (("one", 15), ("two", 15), ("long", 50)):
        put_attempt(results, "a", [CLICK, "DONE"], model=model)
        put_arguments(results, model, settings | {"model": model, "result_dir": f"./{model}", "max_steps": budget})
    put_attempt(results, "a", [CLICK, "DONE"], model="more tasks")
    put_attempt(results, "b", [CLICK, "DONE"], model="more tasks")
    put_arguments(results, "more tasks", settings)
    for model in ("silent", "mute"):
        put_attempt(results, "a", [CLICK, "DONE"], model=model)
    board = build_leaderboard(import_evaluations(state, results), {}, planned={})
    tables = sorted(sorted(row.score.checkpoint_id for row in table.rows) for table in board.tables)
    odd = next(name for (name, *_) in tables if name.startswith("theirs-more_tasks-"))
    assert tables == [["theirs-long"], [odd], ["theirs-mute"], ["theirs-one", "theirs-two"], ["theirs-silent"]]


def evaluated() -> list[Episode]:
    """A checkpoint under two evaluations, with every outcome and a task whose id cannot be a folder's name."""
    plays = {
        "a/b": [Outcome.SUCCESS, Outcome.FAILURE], "c": [Outcome.TRUNCATED, Outcome.POLICY_FAULT],
        "d": [Outcome.GRADER_FAULT, Outcome.SUCCESS],
    }  # fmt: skip
    rewards = {Outcome.SUCCESS: Reward(task=1.0), Outcome.FAILURE: Reward(task=0.25), Outcome.TRUNCATED: Reward(task=0)}
    episodes = []
    for key in (KEY, KEY[::-1]):
        for task_id, outcomes in plays.items():
            for seed, outcome in enumerate(outcomes):
                end = make_step(0, sha256="", command="DONE" if outcome is Outcome.FAILURE else "WAIT", action=None)
                episodes.append(
                    make_episode(
                        f"{key}-{len(episodes)}", task_id=task_id, outcome=outcome, reward=rewards.get(outcome),
                        checkpoint_id="sft-1", stage_key=f"eval-sft-1-{key}", seed=seed, grader_version="g-7",
                        suite="osworld", suite_name="osworld-chrome",
                        error=None if outcome.is_valid else "it broke",
                        steps=() if outcome is Outcome.GRADER_FAULT else (end,),
                    )
                )  # fmt: skip
    return episodes


def test_our_own_export_comes_back_with_the_same_numbers(tmp_path: Path, state: StateDir) -> None:
    first = StateDir(tmp_path / "first")
    store = TrajectoryStore(first)
    name = store.write_blob(picture(1), suffix="png")
    played = [
        replace(episode, steps=tuple(replace(step, screenshot_sha256=name) for step in episode.steps))
        for episode in evaluated()
    ]
    store.write_episodes("evals", played)
    export_osworld_results(first, tmp_path / "out")
    rows = import_evaluations(state, tmp_path / "out")

    def reported(row: EvalRow) -> tuple[Any, ...]:
        return row.evaluation_key, row.task_id, row.seed, row.outcome, row.reward, row.error, row.grader_version

    assert {reported(row) for row in rows} == {reported(row) for row in read_evals(first)}
    with fresh_views(state) as connection:
        found = connection.execute("SELECT DISTINCT suite, suite_name FROM evals").fetchall()
    assert found == [("osworld", "osworld-chrome")]
    assert {row.checkpoint_id for row in rows} == {"theirs-sft-1"}
    for ours, theirs in zip(read_scores(first), read_scores(state), strict=True):
        assert (ours.lenient, ours.strict, ours.outcomes) == (theirs.lenient, theirs.strict, theirs.outcomes)


def test_a_later_result_overrides_the_outcome_in_our_export(state: StateDir, results: Path) -> None:
    folder = put_attempt(results, "again", [CLICK, "DONE"], result="1.0\n")
    (folder / "episode.json").write_text(json.dumps({"outcome": "env_fault", "reward": None, "seed": 4, "error": "x"}))
    (row,) = import_evaluations(state, results)
    assert (row.outcome, row.error, row.seed) == ("success", None, 4)


def test_the_command_imports_evaluations_and_refuses_them_of_other_kinds(state: StateDir, results: Path) -> None:
    put_attempt(results, "solved", [CLICK, "DONE"])

    def run(kind: str) -> subprocess.CompletedProcess[str]:
        options = ["--name", "theirs", "--licence", "MIT", "--evaluations", "--state", str(state.root)]
        command = [sys.executable, "-m", "osworld_pipeline.cli", "import", kind, str(results), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done, refused = run("osworld-results"), run("agentnet")
    assert done.returncode == 0, done.stderr
    assert "0 demonstrations, 1 episodes" in done.stdout
    assert refused.returncode == 2
    assert "grader's scores" in refused.stderr
