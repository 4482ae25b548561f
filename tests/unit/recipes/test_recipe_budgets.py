"""The numbers of the shipped recipes are consistent: the screenshots and responses of a recipe fit its context."""

import pytest
from pydantic import ValidationError

from osworld_pipeline.agent.images import SIDE_FACTOR, fit_size
from osworld_pipeline.recipes import Recipe, load_recipe, recipe_names

TEXT_TOKENS = 1024
"""For a system prompt, a task, and what stands around turns."""
CHARACTERS_A_TOKEN = 3
RECIPES = [(name, is_smoke) for name in sorted(recipe_names()) for is_smoke in (False, True)]


def screen_tokens(recipe: Recipe) -> int:
    if not recipe.agent.show_screenshots:
        return 0
    width, height = fit_size(recipe.desktop.screen_width, recipe.desktop.screen_height, recipe.agent.max_pixels)
    return (width // SIDE_FACTOR) * (height // SIDE_FACTOR)


def observation_tokens(recipe: Recipe) -> int:
    tree = recipe.agent.a11y_max_length // CHARACTERS_A_TOKEN if recipe.desktop.require_a11y_tree else 0
    return screen_tokens(recipe) + tree


def recipes_of(mode: str) -> list[tuple[str, bool]]:
    return [(name, is_smoke) for name, is_smoke in RECIPES if load_recipe(name).agent.context_mode == mode]


@pytest.mark.parametrize(("name", "is_smoke"), recipes_of("append"))
def test_a_growing_context_holds_every_turn_of_its_recipe(name: str, is_smoke: bool) -> None:
    recipe = load_recipe(name, is_smoke=is_smoke)
    num_turns = max(recipe.agent.max_turns, recipe.evaluation.max_turns)
    needed = num_turns * (observation_tokens(recipe) + recipe.agent.max_response_tokens)
    assert needed + min(TEXT_TOKENS, recipe.agent.max_context_tokens // 2) <= recipe.agent.max_context_tokens


@pytest.mark.parametrize(("name", "is_smoke"), recipes_of("window"))
def test_a_window_holds_its_screenshots_and_an_answer(name: str, is_smoke: bool) -> None:
    recipe = load_recipe(name, is_smoke=is_smoke)
    needed = recipe.agent.window_screenshots * screen_tokens(recipe) + recipe.agent.max_response_tokens
    needed += observation_tokens(recipe) - screen_tokens(recipe)
    assert needed + min(TEXT_TOKENS, recipe.agent.max_context_tokens // 4) <= recipe.agent.max_context_tokens


def test_a_group_of_one_and_more_parts_than_episodes_are_refused() -> None:
    fields = load_recipe("smoke").model_dump(mode="json")
    for changes, sentence in (
        ({"group_size": 1}, r"gspo.group_size\s+Input should be greater than or equal to 2"),
        (
            {"group_size": 2, "tasks_per_update": 1, "minibatches_per_update": 3},
            "must not exceed the episodes of an",
        ),
    ):
        with pytest.raises(ValidationError, match=sentence):
            Recipe.model_validate({**fields, "gspo": {**fields["gspo"], **changes}})
