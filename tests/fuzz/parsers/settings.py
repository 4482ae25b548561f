"""Recipes, single settings, the env server's configuration file, and the licence in a model's card."""

from pathlib import Path

import osworld_pipeline.recipes
from env_server.config import make_settings, read_config
from env_server.settings import SettingsError
from fuzz.parser import Parser, scratch_folder, text_of
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes.load import load_recipe, parse_recipe
from osworld_pipeline.runs.checkpoints.model_card import CARD, MAX_CHARACTERS, card_licence

RECIPES = Path(osworld_pipeline.recipes.__file__).parent


def _recipe_file(data: bytes) -> None:
    with scratch_folder() as folder:
        path = folder / "own.toml"
        path.write_bytes(data)
        recipe = load_recipe(str(path))
    assert parse_recipe(data.decode(), name="own").model_dump(mode="json") == recipe.model_dump(mode="json")


def _setting(data: bytes) -> None:
    load_recipe("smoke", settings=[text_of(data)]).model_dump_json()


def _server_config(data: bytes) -> None:
    with scratch_folder() as folder:
        path = folder / "server.toml"
        path.write_bytes(data)
        make_settings(read_config(path), {})


def _model_card(data: bytes) -> None:
    with scratch_folder() as folder:
        (folder / CARD).write_bytes(data)
        licence = card_licence(folder)
    assert licence is None or 0 < len(licence) <= MAX_CHARACTERS


PARSERS = [
    Parser(
        name="recipe",
        read=_recipe_file,
        refusals=(RecipeError,),
        seeds=tuple((RECIPES / name).read_bytes() for name in ("smoke.toml", "qwen3vl_4b_lora.toml")),
    ),
    Parser(
        name="setting",
        read=_setting,
        refusals=(RecipeError,),
        seeds=(
            b"agent.max_turns=4",
            b"evaluation.temperature = 0.7",
            b"agent.system_prompt=short",
            b"sft.warmup_updates=",
        ),
    ),
    Parser(
        name="server_config",
        read=_server_config,
        refusals=(SettingsError,),
        seeds=(
            b'provider = "local"\nnum_replicas = 4\n[limits]\nsetup_timeout_s = 12.5\n',
            b"port = 8080\nscreen_width = 1280\n",
        ),
    ),
    Parser(
        name="model_card",
        read=_model_card,
        refusals=(),
        seeds=(
            b"---\nlicense: apache-2.0\ntags: [a, b]\n---\n# Model\n",
            b"---\nlicense: other\nlicense_name: &a mine\nextra: {size: 4, list: [*a, 1.5]}\n---\n",
        ),
    ),
]
