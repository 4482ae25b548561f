"""Each check of an asset passes on a sound state and finds what breaks it."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_samples import make_checkpoint, write_evaluation
from episode_samples import make_episode
from raw_samples import config, image_bytes, put_lines, put_task, record

from assets.checks import CHECKS
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.sources.union_build import ensure_union
from osworld_pipeline.runs.verify_replay.summary import FailedDemonstration, VerificationSummary, write_summary
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.owned import read_table, write_table
from resources.state import StateResource

BY_NAME = {next(iter(check.check_keys)).name: check for check in CHECKS}
SUMMARY = VerificationSummary(
    num_rows=10, num_demonstrations=10, num_chosen=10, num_verified=9, num_failed=1, num_open=0, num_faults=0,
    num_tasks=1, coverage=1.0, verified_coverage=1.0, failed=(), unplayable={}, digest="d",
)  # fmt: skip
FAILED = FailedDemonstration(row_id="r1", task_id="t1", source="bc_sft: a.jsonl:1", earned=(0.0, 0.0), error=None)


def ask(state: StateDir, name: str) -> dg.AssetCheckResult:
    rebuild_catalog(state)
    return run_check(state, name)


def run_check(state: StateDir, name: str) -> dg.AssetCheckResult:
    result = BY_NAME[name](state=StateResource(path=str(state.root)))
    assert isinstance(result, dg.AssetCheckResult)
    return result


def offenders(result: dg.AssetCheckResult) -> str:
    return str(result.metadata["offenders"].value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A sound state: a source, its task, and an update with an injection."""
    state = StateDir(tmp_path_factory.mktemp("sound"))
    put_lines(state, "bc_sft", [record("t1")])
    put_task(state, config("t1"))
    ensure_union(state, load_recipe("smoke"))
    row_id = read_table(state, "replay_buffer").column("row_id")[0].as_py()
    store = TrajectoryStore(state)
    sha256 = store.write_blob(image_bytes(9), suffix="png")
    episode = make_episode("e1")
    episode = replace(episode, steps=tuple(replace(step, screenshot_sha256=sha256) for step in episode.steps))
    group = RolloutGroup(group_id="g1", task_id="t1", stage_key="s", update=0, episodes=(episode,))
    store.write_episodes("p1", [episode])
    store.write_groups("p1", [group], [injection(row_id)])
    write_summary(state, SUMMARY)
    return state


@pytest.fixture
def state(sound: StateDir, tmp_path: Path) -> StateDir:
    """A copy of the sound state, to break."""
    shutil.copytree(sound.root, tmp_path / "state")
    return StateDir(tmp_path / "state")


def injection(row_id: str) -> Injection:
    return Injection(
        injection_id=f"i-{row_id}", group_id="g1", row_id=row_id, task_id="t1", source_dataset="bc_sft", reward=1.0,
        advantage=1.0, weight=1.0,
    )  # fmt: skip


def test_every_check_passes_on_a_sound_state(sound: StateDir) -> None:
    rebuild_catalog(sound)
    assert {name for name in BY_NAME if not run_check(sound, name).passed} == set()


def change_table(state: StateDir, name: str, **changes: Any) -> None:
    rows = [row | changes for row in read_table(state, name).to_pylist()]
    write_table(state, name, pa.Table.from_pylist(rows, schema=read_table(state, name).schema))


def test_a_duplicate_task_id_is_found(state: StateDir) -> None:
    table = read_table(state, "union_tasks")
    rebuild_catalog(state)
    write_table(state, "union_tasks", pa.concat_tables([table, table]))
    result = run_check(state, "task_ids_are_unique")
    assert not result.passed
    assert "| t1 | 2 rows |" in offenders(result)


def test_a_chunk_id_is_not_accepted_as_a_task_id(state: StateDir) -> None:
    change_table(state, "union_tasks", task_id="t1_chunk3")
    assert "an id of a chunk" in offenders(ask(state, "task_ids_are_unique"))


def test_a_state_without_training_tasks_is_found(state: StateDir) -> None:
    write_table(state, "train_tasks", read_table(state, "train_tasks").slice(0, 0))
    assert not ask(state, "there_are_training_tasks").passed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"has_task_config": False}, "no config"),
        ({"task_config": None}, "no config"),
        ({"platform": "windows"}, "a Windows task"),
        ({"task_id": "t9"}, "no demonstration"),
    ],
)
def test_a_training_task_that_cannot_be_run_is_found(state: StateDir, changes: dict[str, Any], problem: str) -> None:
    change_table(state, "train_tasks", **changes)
    assert problem in offenders(ask(state, "training_tasks_can_be_run"))


@pytest.mark.parametrize(("source", "is_fit"), [("wine-basics/x", True), ("windows-basics/x", True), ("office", False)])
def test_a_windows_task_is_trained_on_if_its_suite_was_requested(state: StateDir, source: str, is_fit: bool) -> None:
    task = json.dumps({"id": "t1", "source": source})
    change_table(state, "train_tasks", platform="windows", task_config=task)
    assert ask(state, "training_tasks_can_be_run").passed == is_fit


@pytest.mark.parametrize(
    ("text", "dialect", "problem"),
    [("I ponder.", "slime", "turn 0"), ("I ponder.", None, "turn 0"), ("WAIT", "klingon", "no dialect named")],
)
def test_a_replay_row_that_its_dialect_cannot_read_is_found(
    state: StateDir, text: str, dialect: str | None, problem: str
) -> None:
    turn = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    change_table(state, "replay_buffer", messages=[turn], dialect=dialect)
    assert problem in offenders(ask(state, "replay_rows_can_be_read"))


def test_a_demonstration_without_a_turn_is_found(state: StateDir) -> None:
    change_table(state, "replay_buffer", messages=[])
    assert "no agent turn" in offenders(ask(state, "replay_rows_can_be_read"))


@pytest.mark.parametrize("sha256", [digest_bytes(image_bytes(1)), digest_bytes(image_bytes(9))])
def test_a_missing_image_of_a_demonstration_or_of_a_step_is_found(state: StateDir, sha256: str) -> None:
    TrajectoryStore(state).blobs.find_file(sha256).unlink()
    assert sha256[:12] in offenders(ask(state, "no_blob_is_missing"))


def test_a_source_that_loses_most_of_its_records_is_reported_and_blocks_nothing(state: StateDir) -> None:
    put_lines(state, "bc_sft", [record("t1"), *["{cut"] * 30])
    ensure_union(state, load_recipe("smoke"))
    result = ask(state, "few_records_are_rejected")
    assert "bc\\_sft" in offenders(result)
    assert result.severity is dg.AssetCheckSeverity.WARN


def test_demonstrations_that_do_not_earn_their_reward_are_reported_above_a_tenth(state: StateDir) -> None:
    write_summary(state, replace(SUMMARY, num_verified=8, num_failed=2, failed=(FAILED, FAILED)))
    result = ask(state, "demonstrations_earn_their_reward")
    assert "bc\\_sft: a.jsonl:1" in offenders(result)
    assert result.severity is dg.AssetCheckSeverity.WARN
    write_summary(state, replace(SUMMARY, failed=(FAILED,)))
    assert ask(state, "demonstrations_earn_their_reward").passed


def without_group(state: StateDir) -> None:
    group = RolloutGroup(group_id="g2", task_id="t1", stage_key="s", update=1, episodes=())
    row_id = read_table(state, "replay_buffer").column("row_id")[0].as_py()
    TrajectoryStore(state).write_groups("p2", [group], [replace(injection(row_id), injection_id="i2", group_id="gone")])


def without_row(state: StateDir) -> None:
    change_table(state, "replay_buffer", row_id="another")


@pytest.mark.parametrize(
    ("lose", "problem"), [(without_group, "its group is gone"), (without_row, "its replay row is gone")]
)
def test_an_orphan_injection_is_found(state: StateDir, lose: Callable[[StateDir], None], problem: str) -> None:
    lose(state)
    assert problem in offenders(ask(state, "no_orphan_injection"))


def test_an_injected_episode_is_not_an_orphan(state: StateDir) -> None:
    group = RolloutGroup(group_id="g1", task_id="t1", stage_key="s", update=0, episodes=())
    TrajectoryStore(state).write_groups("p1", [group], [replace(injection("e1"), kind="episode")])
    assert ask(state, "no_orphan_injection").passed


def test_an_episode_that_lost_a_step_is_found(state: StateDir) -> None:
    (path,) = (state.trajectories / "steps").glob("p1*.parquet")
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)
    assert "| e1 | 2 | 1 |" in offenders(ask(state, "episodes_have_their_steps"))


def test_an_episode_without_steps_is_sound_if_it_counts_none(state: StateDir) -> None:
    fault = replace(make_episode("e2"), steps=(), outcome=Outcome.ENV_FAULT, reward=None)
    TrajectoryStore(state).write_episodes("p2", [fault])
    assert ask(state, "episodes_have_their_steps").passed


def test_only_checks_that_correct_training_depends_on_are_blocking() -> None:
    blocking = {name for name, check in BY_NAME.items() if next(iter(check.check_specs)).blocking}
    assert blocking == {
        "task_ids_are_unique",
        "there_are_training_tasks",
        "training_tasks_can_be_run",
        "replay_rows_can_be_read",
        "no_blob_is_missing",
        "training_was_sound",
    }


@pytest.mark.parametrize(
    ("figure", "value", "is_sound"),
    [
        ("loss", math.nan, False), ("loss", 0.1, True), ("kl", 6.0, False), ("kl", 0.5, True),
        ("trainer_sampler_logprob_diff", 0.2, False), ("trainer_sampler_logprob_diff", math.nan, False),
        ("trainer_sampler_logprob_diff", 0.004, True), ("success_rate", math.nan, True),
    ],
)  # fmt: skip
def test_training_that_diverged_is_found(state: StateDir, figure: str, value: float, is_sound: bool) -> None:
    upsert_checkpoint(state, make_checkpoint("sft-1", metrics={figure: value}))
    rebuild_catalog(state)
    assert ask(state, "training_was_sound").passed == is_sound


def test_a_checkpoint_that_is_worse_than_its_parent_is_reported_and_blocks_nothing(state: StateDir) -> None:
    recipe = load_recipe("smoke", settings=["suite.num_heldout=10"])
    upsert_checkpoint(state, make_checkpoint("sft-1"))
    upsert_checkpoint(state, make_checkpoint("sft-2", parent_id="sft-1"))
    write_evaluation(state, recipe, "sft-1", num_successes=15)
    write_evaluation(state, recipe, "sft-2", num_successes=14)
    assert ask(state, "no_checkpoint_fell_behind_its_parent").passed
    write_evaluation(state, recipe, "sft-2", num_successes=3)
    result = ask(state, "no_checkpoint_fell_behind_its_parent")
    assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
