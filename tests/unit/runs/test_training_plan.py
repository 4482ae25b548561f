"""The resources that a training will take, calculated by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from replay_samples import rollout

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.training_plan import MIN_EPISODES, plan_training
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog

STAGES = (Stage.BASE, Stage.SFT, Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def test_episodes_are_updates_times_tasks_times_siblings(state: StateDir) -> None:
    settings = ["gspo.phase1.num_updates=5", "gspo.phase2.num_updates=3", "gspo.tasks_per_update=8"]
    recipe = load_recipe("qwen3vl_4b_lora", settings=settings)
    plan = plan_training(recipe, STAGES, state)
    found = {stage.stage: (stage.num_updates, stage.num_episodes) for stage in plan.stages}
    assert found == {Stage.SFT: (400, 0), Stage.GSPO_PHASE1: (5, 5 * 8 * 4), Stage.GSPO_PHASE2: (3, 3 * 8 * 4)}
    assert plan.num_episodes == 256


def test_a_flywheel_samples_every_task_in_every_round(state: StateDir) -> None:
    recipe = load_recipe(
        "smoke", settings=["flywheel.num_rounds=2", "flywheel.max_tasks=7", "flywheel.samples_per_task=3"]
    )
    (plan,) = plan_training(recipe, [Stage.FLYWHEEL], state).stages
    assert plan.num_episodes == 2 * 7 * 3


def test_an_adapter_checkpoint_holds_factors_and_two_moments(state: StateDir) -> None:
    """4B: 36 layers; q, k, v, o and the three of the MLP of width 9,728, each with inputs + outputs numbers a rank."""
    sizes = (2560 + 4096) + 2 * (2560 + 1024) + (4096 + 2560) + 3 * (2560 + 9728)
    plan = plan_training(load_recipe("qwen3vl_4b_lora"), STAGES, state)
    assert plan.checkpoint_bytes == 36 * 32 * sizes * 12


def test_checkpoints_on_disk_are_the_final_one_those_to_resume_from_and_milestones(state: StateDir) -> None:
    settings = ["trainer.keep_last=2", "trainer.keep_every=2", "gspo.phase1.num_updates=5"]
    plan = plan_training(load_recipe("smoke", settings=settings), [Stage.GSPO_PHASE1], state)
    assert plan.num_checkpoints == 1 + 2 + 2


def test_each_round_of_a_flywheel_keeps_its_checkpoint(state: StateDir) -> None:
    settings = ["trainer.keep_last=2", "flywheel.num_rounds=3"]
    assert plan_training(load_recipe("smoke", settings=settings), [Stage.FLYWHEEL], state).num_checkpoints == 3 + 2


def test_time_is_estimated_from_episodes_of_this_state_alone(state: StateDir) -> None:
    recipe = load_recipe("smoke", settings=["rollout.max_concurrent_episodes=4", "gspo.phase1.num_updates=2"])
    empty = plan_training(recipe, [Stage.GSPO_PHASE1], state)
    assert (empty.episode_s, empty.rollout_s) == (None, None)
    episodes = [
        replace(rollout(f"e{index}"), times_s={"total": 10.0 + index % 3}, purpose="train")
        for index in range(3 * MIN_EPISODES)
    ]
    TrajectoryStore(state).write_episodes("part", episodes)
    rebuild_catalog(state)
    plan = plan_training(recipe, [Stage.GSPO_PHASE1], state)
    assert plan.episode_s == 11.0
    assert plan.rollout_s == pytest.approx(plan.num_episodes * 11.0 / 4)
