"""If something that a recipe's rollouts need is missing, they are refused before anything runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError, RecipeError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import num_slots, rollout_session, sampling_params

NOWHERE = EnvServers(urls=("http://127.0.0.1:9",), token=None, num_replicas=3)


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    fields = load_recipe("smoke").model_dump(mode="json")
    for name, changes in sections.items():
        fields[name] |= changes
    return Recipe.model_validate(fields)


@pytest.mark.parametrize("dialect", ["slime", "pyautogui", "sendkey", "osgym"])
def test_responses_end_at_the_stop_strings_of_their_dialect(dialect: str) -> None:
    from osworld_pipeline.dialects import load_dialect

    params = sampling_params(recipe_of(agent={"dialect": dialect}), temperature=0.7, top_p=0.9, seed=5)
    assert params.stop == load_dialect(dialect).stop
    assert (params.temperature, params.top_p, params.seed, params.max_new_tokens) == (0.7, 0.9, 5, 32)


def test_as_many_episodes_are_in_flight_as_there_are_desktops_or_as_the_recipe_says() -> None:
    assert num_slots(recipe_of(), NOWHERE) == 3
    assert num_slots(recipe_of(rollout={"max_concurrent_episodes": 64}), NOWHERE) == 64


async def test_an_engine_that_samples_from_a_checkpoint_is_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="transformers samples from a checkpoint, and there is none"):
        async with rollout_session(recipe=recipe_of(), state=StateDir(tmp_path), servers=NOWHERE, purpose="c"):
            raise AssertionError("it was opened")


async def test_an_unreachable_env_server_is_named_and_nothing_is_left_open(tmp_path: Path) -> None:
    recipe = recipe_of(engine={"kind": "openai", "urls": ["http://127.0.0.1:9/v1"], "model": "m"})
    with pytest.raises(EnvServerError, match="no env server answers at"):
        async with rollout_session(recipe=recipe, state=StateDir(tmp_path), servers=NOWHERE, purpose="c"):
            raise AssertionError("it was opened")
    assert len(asyncio.all_tasks()) == 1


async def test_sglang_engines_of_one_run_share_an_owner_and_use_the_vocabulary_size_of_the_checkpoint(
    tiny_folder: Path, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []

    class Opened(Exception): ...

    def open_engine(urls: Any, **options: Any) -> None:
        opened.append(options)
        raise Opened

    monkeypatch.setattr("osworld_pipeline.rollout.engines.sglang.SglangEngine", open_engine)
    recipe = recipe_of(engine={"kind": "sglang", "urls": ["http://127.0.0.1:9"]})
    for state, purpose, run in (
        ("state", "gspo-actor0", "gspo"),
        ("state", "gspo-actor1", "gspo"),
        ("state", "gspo", None),
        ("state", "evaluation", None),
        ("another", "gspo", None),
    ):
        with pytest.raises(Opened):
            async with rollout_session(
                recipe=recipe,
                state=StateDir(tmp_path / state),
                servers=NOWHERE,
                purpose=purpose,
                folder=tiny_folder,
                processor=processor,
                run=run,
            ):
                raise AssertionError("it was opened")
    owners = [options["owner"] for options in opened]
    assert owners[0] == owners[1] == owners[2]
    assert len(set(owners)) == 3
    vocab_size = json.loads((tiny_folder / "config.json").read_text())["text_config"]["vocab_size"]
    assert {options["vocab_size"] for options in opened} == {vocab_size}
