"""Ids of stages: they change with what changes a result, and with nothing else."""

from dataclasses import replace

import pytest

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import Recipe, load_recipe, parse_recipe, recipe_names
from osworld_pipeline.runs.checkpoints.ids import stage_checkpoint_id, stage_params
from osworld_pipeline.runs.evaluate.plan import plan_evaluation

RECIPE = load_recipe("smoke")


def changed(**sections: dict) -> Recipe:
    data = RECIPE.model_dump(mode="json")
    for name, values in sections.items():
        data[name] = {**data[name], **values}
    return Recipe.model_validate(data)


def id_of(stage: Stage, recipe: Recipe = RECIPE, parent: str | None = "base-1", data: str = "d") -> str:
    return stage_checkpoint_id(stage, recipe, parent_id=parent, data_digest=data)


def test_same_inputs_give_the_same_id() -> None:
    assert id_of(Stage.SFT) == id_of(Stage.SFT)


@pytest.mark.parametrize("stage", [Stage.SFT, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2])
def test_another_parent_or_other_data_give_another_id(stage: Stage) -> None:
    assert len({id_of(stage), id_of(stage, parent="base-2"), id_of(stage, data="e")}) == 3


def test_learning_rate_of_sft_changes_the_id_of_sft_and_not_that_of_the_base() -> None:
    other = changed(sft={"learning_rate": 5e-4})
    assert id_of(Stage.SFT, other) != id_of(Stage.SFT)
    assert id_of(Stage.BASE, other) == id_of(Stage.BASE)


def test_number_of_desktops_changes_no_id() -> None:
    other = changed(desktop={"num_replicas": 7})
    for stage in Stage:
        assert id_of(stage, other) == id_of(stage)


def test_a_phase_does_not_depend_on_the_other_phase() -> None:
    other = changed(gspo={"phase2": {"num_updates": 9, "temperature": 0.1}})
    assert id_of(Stage.GSPO_PHASE1, other) == id_of(Stage.GSPO_PHASE1)
    assert id_of(Stage.GSPO_PHASE2, other) != id_of(Stage.GSPO_PHASE2)
    assert "phase2" not in stage_params(Stage.GSPO_PHASE1, RECIPE)["gspo"]


def test_every_shipped_recipe_loads() -> None:
    assert {"demo", "smoke", "qwen3vl_4b"} <= set(recipe_names())
    for name in recipe_names():
        assert load_recipe(name).name == name


def test_unknown_key_of_a_recipe_is_refused_by_name() -> None:
    text = 'lerning_rate = 1\n[model]\nkind = "tiny"\n[sft]\nnum_updates = 1\nlearning_rate = 1.0\n'
    text += "[gspo.phase1]\nnum_updates = 1\ntemperature = 1.0\n[gspo.phase2]\nnum_updates = 1\ntemperature = 1.0\n"
    with pytest.raises(
        RecipeError,
        match=r"recipe typo, line [0-9]+: unknown key `lerning_rate`; did you mean `[a-z.]*learning_rate`\?",
    ):
        parse_recipe(text, name="typo")


def test_contradiction_in_a_recipe_is_refused_on_load() -> None:
    with pytest.raises(ValueError, match="max_response_tokens must be smaller"):
        changed(agent={"max_response_tokens": 4096, "max_context_tokens": 1536})


def test_an_evaluation_has_one_episode_for_each_heldout_task_and_seed() -> None:
    recipe = changed(evaluation={"seeds": [0, 1]})
    plan = plan_evaluation(recipe, "sft-1")
    assert len(plan.episodes) == 2 * len(RECIPE.suite.families) * RECIPE.suite.num_heldout
    assert {(task.task_id, episode.seed) for task, episode in plan.episodes.values()} == {
        (task.task_id, seed) for task, _ in plan.episodes.values() for seed in (0, 1)
    }
    again = plan_evaluation(recipe, "sft-1")
    assert list(again.episodes) == list(plan.episodes)
    assert replace(again, episodes={}) == replace(plan, episodes={})
