"""The choice of the champion: only complete evaluations count, and only a paired test replaces the champion."""

from pathlib import Path

import pytest
from checkpoint_samples import lay_down, make_checkpoint, write_evaluation
from episode_samples import make_episode

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, register_checkpoint
from osworld_pipeline.runs.evaluate.champion import choose_champion
from osworld_pipeline.runs.evaluate.plan import plan_evaluation
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import read_checkpoints, upsert_checkpoint

RECIPE = load_recipe("smoke", settings=["suite.num_heldout=10"])
"""20 held-out tasks."""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    base = make_checkpoint("base-1", Stage.BASE)
    lay_down(state, base, make_checkpoint("sft-1", parent_id="base-1"), make_checkpoint("sft-2", parent_id="base-1"))
    return state


def test_without_an_evaluation_there_is_no_champion(state: StateDir) -> None:
    choice = choose_champion(state, RECIPE, current=None)
    assert (choice.checkpoint_id, choice.is_new) == (None, False)


def test_first_champion_is_the_best_of_the_trained_ones(state: StateDir) -> None:
    write_evaluation(state, RECIPE, "base-1", num_successes=20)
    write_evaluation(state, RECIPE, "sft-1", num_successes=3)
    write_evaluation(state, RECIPE, "sft-2", num_successes=5)
    choice = choose_champion(state, RECIPE, current=None)
    assert (choice.checkpoint_id, choice.is_new) == ("sft-2", True)


@pytest.mark.parametrize(("num_successes", "champion"), [(4, "sft-1"), (6, "sft-1"), (14, "sft-2")])
def test_challenger_must_be_significantly_better_than_the_champion(
    state: StateDir, num_successes: int, champion: str
) -> None:
    write_evaluation(state, RECIPE, "sft-1", num_successes=5)
    write_evaluation(state, RECIPE, "sft-2", num_successes=num_successes)
    choice = choose_champion(state, RECIPE, current="sft-1")
    assert choice.checkpoint_id == champion
    assert choice.is_new == (champion != "sft-1")
    assert "sft-2 against sft-1" in choice.reason


def test_checkpoint_whose_evaluation_has_a_fault_does_not_become_champion(state: StateDir) -> None:
    write_evaluation(state, RECIPE, "sft-1", num_successes=5)
    write_evaluation(state, RECIPE, "sft-2", num_successes=19, num_faults=1)
    assert choose_champion(state, RECIPE, current="sft-1").checkpoint_id == "sft-1"


def test_champion_without_an_evaluation_of_these_settings_stays_and_the_reason_is_given(state: StateDir) -> None:
    write_evaluation(state, RECIPE, "sft-2", num_successes=20)
    choice = choose_champion(state, RECIPE, current="sft-1")
    assert (choice.checkpoint_id, choice.is_new) == ("sft-1", False)
    assert "evaluate it" in choice.reason


def test_a_challenger_on_another_desktop_image_or_grader_does_not_become_champion(state: StateDir) -> None:
    write_evaluation(state, RECIPE, "sft-1", num_successes=5, grader_version="7")
    write_evaluation(state, RECIPE, "sft-2", num_successes=20, grader_version="8")
    choice = choose_champion(state, RECIPE, current="sft-1")
    assert (choice.checkpoint_id, choice.is_new) == ("sft-1", False)
    assert (
        "no other checkpoint was evaluated with its desktop image and grader (unknown image/grader 7)" in choice.reason
    )


def test_a_checkpoint_evaluated_by_two_graders_does_not_become_champion(state: StateDir) -> None:
    write_evaluation(state, RECIPE, "sft-1", num_successes=5, grader_version="7")
    write_evaluation(state, RECIPE, "sft-2", num_successes=20, grader_version="7")
    plan = plan_evaluation(RECIPE, "sft-2")
    part, (task, planned) = next(iter(plan.episodes.items()))
    other = make_episode(
        planned.episode_id, task_id=task.task_id, checkpoint_id="sft-2", stage_key=plan.stage_key, grader_version="8"
    )
    TrajectoryStore(state).write_episodes(part, [other])
    assert choose_champion(state, RECIPE, current="sft-1").checkpoint_id == "sft-1"
    assert choose_champion(state, RECIPE, current=None).checkpoint_id == "sft-1"


def test_milestones_are_found_by_their_folders_and_get_a_row_when_they_are_needed(state: StateDir) -> None:
    upsert_checkpoint(state, make_checkpoint("sft-1"))
    lay_down(state, make_checkpoint("sft-1-u0002", num_updates=2))
    assert [one.checkpoint_id for one in all_checkpoints(state)] == ["base-1", "sft-1-u0002", "sft-1", "sft-2"]
    assert register_checkpoint(state, "sft-1-u0002").num_updates == 2
    assert [one.checkpoint_id for one in read_checkpoints(state)] == ["sft-1", "sft-1-u0002"]
    with pytest.raises(TableError, match=r"no checkpoint 'sft-9' in .*; there are: base-1, sft-1-u0002, sft-1, sft-2"):
        register_checkpoint(state, "sft-9")
