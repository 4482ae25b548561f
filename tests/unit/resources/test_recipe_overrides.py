"""The keys of a recipe as typed configuration of a run."""

from typing import Any

import dagster as dg
import pytest

from osworld_pipeline.definitions import defs
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.load import OWN_KEYS, recipe_names
from resources.recipe_overrides import Overrides
from resources.state import RecipeResource

TRAIN = defs.resolve_job_def("train")


def check(overrides: dict[str, Any]) -> None:
    dg.validate_run_config(TRAIN, {"resources": {"recipe": {"config": {"name": "smoke", "overrides": overrides}}}})


@pytest.mark.parametrize("name", recipe_names())
def test_all_values_of_a_recipe_as_overrides_give_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name)
    values = recipe.model_dump(mode="json", exclude=set(OWN_KEYS), exclude_none=True)
    check(values)
    again = RecipeResource(name=name, overrides=Overrides(**values)).load()
    assert again.model_copy(update={"sources": {}}) == recipe.model_copy(update={"sources": {}})


def test_a_command_line_setting_has_priority_over_an_override_and_an_override_over_the_file() -> None:
    overrides = Overrides(agent={"max_turns": 3, "max_pixels": 200_000})
    source = RecipeResource(name="smoke", overrides=overrides, settings=["agent.max_turns=5"])
    assert load_recipe("smoke").agent.max_turns == 2
    assert (source.load().agent.max_turns, source.load().agent.max_pixels) == (5, 200_000)
    assert source.options == [
        *("--recipe", "smoke", "--set", "agent.max_turns=3", "--set", "agent.max_pixels=200000"),
        *("--set", "agent.max_turns=5"),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"agent": {"max_turn": 3}}, 'unexpected config entry "max_turn"'),
        ({"agent": {"max_turns": "three"}}, "max_turns"),
        ({"agent": {"system_prompt": "shrt"}}, "not in enum type"),
        ({"sources": {"a": "b"}}, 'unexpected config entry "sources"'),
    ],
)
def test_the_launchpad_refuses_unknown_keys_wrong_types_and_unknown_words(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match=message):
        check(overrides)


def test_a_range_and_a_contradiction_are_refused_as_the_recipe_is_loaded() -> None:
    with pytest.raises(RecipeError, match=r"agent\.max_turns"):
        RecipeResource(name="smoke", overrides=Overrides(agent={"max_turns": 0})).load()
