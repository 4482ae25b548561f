"""Every key is documented, every shipped recipe loads and has a description, and the page matches the schema."""

from pathlib import Path

import pytest

from osworld_pipeline.recipes import load_recipe, recipe_names
from osworld_pipeline.recipes.contradictions import CONTRADICTIONS
from osworld_pipeline.recipes.describe import describe, head_comment, keys, sections
from osworld_pipeline.recipes.environment import VARIABLES
from osworld_pipeline.recipes.load import FROM_SMOKE
from osworld_pipeline.recipes.schema import LaunchSection

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipes.md"
EXPECTED = {
    "areal_full",
    "areal_smoke_text",
    "demo",
    "qwen3vl_4b",
    "qwen3vl_4b_async",
    "qwen3vl_4b_grpo",
    "qwen3vl_4b_lora",
    "qwen3vl_4b_node",
    "qwen3vl_8b_lora_node",
    "smoke",
    "windows_keyboard",
}
KEPT_AT_SMOKE_SIZE = (
    ("agent", ("dialect", "coordinate_space", "context_mode", "window_screenshots", "show_screenshots")),
    ("gspo", ("algorithm", "advantage", "length_norm", "kl_coef", "kl_estimator", "importance", "denominator")),
    ("rollout", ("mode", "max_staleness", "signal", "zero_variance", "task_sampling")),
    ("replay", ("strategy", "include_online", "weight", "verify")),
    ("trainer", ("batching", "train_vision")),
)


def test_the_page_matches_the_schema() -> None:
    assert PAGE.read_text() == describe(), "python -m osworld_pipeline.recipes.describe > docs/recipes.md"


def test_no_key_and_no_section_lacks_its_documentation() -> None:
    assert [name for name, field in keys() if not (field.description or "").strip()] == []
    assert [name for name, section in sections() if not (section.__doc__ or "").strip()] == []
    assert len(dict(keys())) > 120


def test_every_variable_fills_an_existing_key() -> None:
    assert {one.key for one in VARIABLES if one.key} <= set(dict(keys()))


@pytest.mark.parametrize("name", sorted(EXPECTED | set(recipe_names())))
def test_shipped_recipe_loads_and_has_a_description(name: str) -> None:
    assert load_recipe(name).name == name
    assert len(head_comment(name)) > 60


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_recipe_at_smoke_size_is_small_and_keeps_its_characteristic_settings(name: str) -> None:
    full, small = load_recipe(name), load_recipe(name, is_smoke=True)
    assert small.model.kind == "tiny"
    assert small.engine.kind == "transformers"
    assert small.desktop.server_urls == ()
    assert small.gspo.phase1.num_updates <= 2
    assert small.trainer.num_processes <= 2
    for section, names in KEPT_AT_SMOKE_SIZE:
        for key in names:
            assert getattr(getattr(small, section), key) == getattr(getattr(full, section), key), key
    assert (small.trainer.lora is None) == (full.trainer.lora is None)
    assert small.reward == full.reward
    assert small.sources["gspo.group_size"] == FROM_SMOKE or full.gspo.group_size == 2
    assert "model.path" not in small.sources, "what is gone came from nowhere"


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_recipe_of_a_published_model_keeps_osworlds_pause(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.model.kind == "tiny" or recipe.desktop.settle == "fixed"
    assert load_recipe(name, is_smoke=True).desktop.settle == "adaptive"


def test_a_setting_wins_over_the_smoke_size() -> None:
    small = load_recipe("qwen3vl_4b", is_smoke=True, settings=["gspo.phase1.num_updates=5"])
    assert small.gspo.phase1.num_updates == 5


@pytest.mark.parametrize("contradiction", CONTRADICTIONS, ids=lambda one: one.sentence[:40])
def test_every_contradiction_can_occur_and_no_shipped_recipe_has_one(contradiction) -> None:
    recipe = load_recipe("demo")
    bad = {
        "agent": {"max_response_tokens": 9000, "max_context_tokens": 20_000},
        "gspo": {"minibatches_per_update": 99, "top_p": 0.95, "old_logprobs": "sampler", "importance_low": 3.0},
        "rollout": {"min_valid_episodes": 99},
        "replay": {"require_verified": True},
        "trainer": {"context_parallel": 2, "lora": object(), "train_vision": True},
        "engine": {"kind": "openai", "weights": "broadcast"},
    }
    sections_ = {name: getattr(recipe, name).model_copy(update=values) for name, values in bad.items()}
    if "max_response_tokens" in contradiction.sentence:
        sections_["agent"] = recipe.agent.model_copy(update={"max_response_tokens": recipe.agent.max_context_tokens})
    if contradiction.sentence.startswith("engine.options"):
        sections_["engine"] = recipe.engine.model_copy(update={"options": {"size": 1}})
    if contradiction.sentence.startswith("engine.launch"):
        sections_["engine"] = recipe.engine.model_copy(update={"launch": LaunchSection()})
    assert contradiction.is_met(recipe.model_copy(update=sections_))
    assert not any(contradiction.is_met(load_recipe(name)) for name in recipe_names())
