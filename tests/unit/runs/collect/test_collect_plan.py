"""A collection: the ids of its episodes, which of them run again, and the actions of the oracle."""

from pathlib import Path

import pytest

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import EpisodePurpose
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.suite_files import HELDOUT, EvalSuite
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.collect.collect import oracle_scripts
from osworld_pipeline.runs.collect.plan import (
    ORACLE,
    TRAIN,
    CollectionPlan,
    holds_back,
    load_collected,
    plan_collection,
    require_oracles,
)
from osworld_pipeline.runs.evaluate.plan import TaskChoice

RECIPE = load_recipe("smoke")


def tasks(state: Path, **choice: object) -> EvalSuite:
    return load_collected(StateDir(state), RECIPE, TaskChoice(**{"suite": TRAIN, **choice}))  # type: ignore[arg-type]


def plan(
    suite: EvalSuite, *, recipe: Recipe = RECIPE, num_samples: int = 2, temperature: float = 1.0
) -> CollectionPlan:
    return plan_collection(recipe, "sft-1", suite, num_samples=num_samples, temperature=temperature)


def test_a_collection_with_more_tasks_and_samples_contains_the_episodes_of_a_smaller_one(tmp_path: Path) -> None:
    small = set(plan(tasks(tmp_path, max_tasks=1), num_samples=1).episode_ids)
    large = set(plan(tasks(tmp_path), num_samples=3).episode_ids)
    assert len(small) == 1
    assert len(large) == 3 * len(recipe_suite(RECIPE).train)
    assert small < large


def test_another_temperature_or_another_agent_makes_other_episodes(tmp_path: Path) -> None:
    suite = tasks(tmp_path)
    agent = load_recipe("smoke", settings=["agent.system_prompt=full"])
    desktops = load_recipe("smoke", settings=["desktop.num_replicas=7"])
    assert plan(suite, temperature=0.5).stage_key != plan(suite).stage_key
    assert plan(suite, recipe=agent).stage_key != plan(suite).stage_key
    assert plan(suite, recipe=desktops) == plan(suite)


def test_task_that_was_changed_is_another_task(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, max_tasks=1).tasks
    changed = Task.from_config({**task.config, "instruction": "Do something else."}, domain=task.domain)
    before = plan(EvalSuite(name="s", tasks=(task,), digest="d"))
    after = plan(EvalSuite(name="s", tasks=(changed,), digest="d"))
    assert set(before.episode_ids).isdisjoint(after.episode_ids)


def test_collected_episodes_are_training_rollouts_that_belong_to_no_update(tmp_path: Path) -> None:
    (_, group, _), *_ = plan(tasks(tmp_path)).groups
    assert (group.purpose, group.update, group.group_size) == (EpisodePurpose.TRAIN, -1, 2)
    assert group.stage_key.startswith("collect-sft-1-")


def test_oracle_solves_only_the_recipes_own_tasks(tmp_path: Path) -> None:
    suite = recipe_suite(RECIPE)
    require_oracles(RECIPE, [item.task for item in (*suite.train, *suite.heldout)])
    strange = Task.from_config({"id": "t1", "instruction": "Do it.", "evaluator": {"func": "infeasible"}})
    with pytest.raises(DatasetError, match="there is no oracle for task t1"):
        require_oracles(RECIPE, [strange])


def test_oracle_writes_the_dialect_with_coordinates_of_the_image_that_a_policy_would_see(tmp_path: Path) -> None:
    recipe = load_recipe("smoke", settings=["agent.max_pixels=40960"])  # 256x160 of a screen of 512x320
    click = next(item for item in recipe_suite(recipe).train if item.family == "click_button")
    suite = EvalSuite(name="one", tasks=(click.task,), digest="d")
    collection = plan_collection(recipe, ORACLE, suite, num_samples=2, temperature=0.0)
    scripts = oracle_scripts(collection, recipe)
    assert set(scripts) == set(collection.episode_ids)
    said = [load_dialect("slime").parse(text).arguments for text in scripts[collection.episode_ids[0]]]
    assert [one["action"] for one in said if one] == [step.arguments["action"] for step in click.oracle]
    on_screen = next(step.arguments["coordinate"] for step in click.oracle if "coordinate" in step.arguments)
    on_image = next(one["coordinate"] for one in said if one and "coordinate" in one)
    assert [2 * value for value in on_image] == pytest.approx(on_screen, abs=2)


def test_heldout_tasks_among_those_collected_are_counted(tmp_path: Path) -> None:
    assert holds_back(RECIPE, tasks(tmp_path)) == 0
    assert holds_back(RECIPE, tasks(tmp_path, suite=HELDOUT)) == len(recipe_suite(RECIPE).heldout)
