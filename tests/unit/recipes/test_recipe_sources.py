"""Sources of a recipe's values: command line, then file, then environment, then default. Each names its source."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.environment import TRUNCATE_TURNS, VARIABLES, own_variables
from osworld_pipeline.recipes.load import source_lines

LEAST = """
[model]
kind = "tiny"
[sft]
num_updates = 1
learning_rate = 1.0
[gspo.phase1]
num_updates = 1
temperature = 1.0
[gspo.phase2]
num_updates = 1
temperature = 1.0
"""
VALUES: dict[str, tuple[str, Any]] = {
    "OSWORLD_SERVER_URL": ("http://a:8100, http://b:8100", ("http://a:8100", "http://b:8100")),
    "OSWORLD_REPLAY_BUFFER": ("/data/osworld_replay_train.jsonl", "/data/osworld_replay_train.jsonl"),
    "OSWORLD_REPLAY_THRESHOLD": ("0.75", 0.75),
    "OSWORLD_MAX_TURNS": ("11", 11),
    "OSWORLD_SCREEN_DIFF_THRESHOLD": ("0.02", 0.02),
    "OSWORLD_TIMEOUT": ("333", 333.0),
    "OSWORLD_REWARD_ALPHA": ("0.7", 0.7),
    "OSWORLD_REWARD_DEBUG_LIMIT": ("2", 2),
    "OSWORLD_A11Y_MAX_LENGTH": ("100", 100),
    "OSWORLD_HTTP_TIMEOUT": ("44.5", 44.5),
    "OSWORLD_OBS_KEEP_FULL_TURNS": ("4", 4),
}
"""Of each variable that fills a key: a text, and what the key then holds."""
PUBLISHED_DEFAULTS: dict[str, Any] = {
    "OSWORLD_SERVER_URL": (),
    "OSWORLD_REPLAY_BUFFER": None,
    "OSWORLD_REPLAY_THRESHOLD": 0.5,
    "OSWORLD_MAX_TURNS": 8,
    "OSWORLD_SCREEN_DIFF_THRESHOLD": 0.005,
    "OSWORLD_TIMEOUT": 900.0,
    "OSWORLD_REWARD_ALPHA": 0.3,
    "OSWORLD_REWARD_DEBUG_LIMIT": 5,
    "OSWORLD_A11Y_MAX_LENGTH": 4096,
}
OTHERS: dict[type, tuple[Any, Any]] = {
    tuple: (("http://file:1",), ("http://line:1",)),
    str: ("from/file", "from/line"),
    int: (1, 2),
    float: (0.25, 0.125),
}
"""Of each kind of value: what the file and the command line say."""
PRECEDENCE = ("command line", "recipe file", "environment", "default")
FILLING = [variable for variable in VARIABLES if variable.key is not None]


def value_of(recipe: Recipe, key: str | None) -> Any:
    assert key is not None
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def write(folder: Path, text: str = "") -> str:
    path = folder / "mine.toml"
    path.write_text(LEAST + text)
    return str(path)


def as_toml(key: str, value: Any) -> str:
    """One more table with one key. A table `gspo` extends the minimal recipe, which has its phases."""
    section, name = key.split(".")
    return f"[{section}]\n{name} = {json.dumps(value)}\n"


def test_every_variable_of_slime_osworld_is_read_under_its_name() -> None:
    assert {variable.name for variable in FILLING} == set(VALUES)
    assert {variable.name for variable in VARIABLES} - set(VALUES) == {TRUNCATE_TURNS}


@pytest.mark.parametrize("variable", FILLING, ids=lambda variable: variable.name)
def test_variable_fills_its_key_and_is_named_as_its_source(variable: Any, tmp_path: Path) -> None:
    text, value = VALUES[variable.name]
    recipe = load_recipe(write(tmp_path), environ={variable.name: text})
    assert value_of(recipe, variable.key) == value
    assert recipe.sources[variable.key] == f"environment {variable.name}"


@pytest.mark.parametrize("name", PUBLISHED_DEFAULTS)
def test_default_is_the_published_one(name: str, tmp_path: Path) -> None:
    variable = next(variable for variable in VARIABLES if variable.name == name)
    assert value_of(load_recipe(write(tmp_path)), variable.key) == PUBLISHED_DEFAULTS[name]


@pytest.mark.parametrize("unset", [{}, {"OSWORLD_HTTP_TIMEOUT": ""}, {"OSWORLD_HTTP_TIMEOUT": "  "}])
def test_a_request_may_take_as_long_as_a_turn_by_default(unset: dict, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), environ=unset)
    assert recipe.env_request_timeout_s == recipe.gspo.turn_timeout_s == 120.0
    assert load_recipe(write(tmp_path), environ={"OSWORLD_HTTP_TIMEOUT": "7"}).env_request_timeout_s == 7.0


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.combinations(PRECEDENCE, 2)))
@pytest.mark.parametrize("variable", FILLING, ids=lambda variable: variable.name)
def test_the_stronger_source_wins(variable: Any, stronger: str, weaker: str, tmp_path: Path) -> None:
    key, text, value = variable.key, *VALUES[variable.name]
    in_file, on_command_line = OTHERS[type(value)]
    wanted = {"command line": on_command_line, "recipe file": in_file, "environment": value}
    given = {stronger, weaker}
    recipe = load_recipe(
        write(tmp_path, as_toml(key, in_file) if "recipe file" in given else ""),
        environ={variable.name: text} if "environment" in given else {},
        settings=[f"{key}={json.dumps(on_command_line)}"] if "command line" in given else [],
    )
    assert value_of(recipe, key) == wanted[stronger]
    assert recipe.sources[key] == (f"environment {variable.name}" if stronger == "environment" else stronger)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_bad_value_is_refused_with_the_name_of_its_variable(variable: Any, tmp_path: Path) -> None:
    if variable.kind in ("path", "URLs, comma-separated"):
        assert load_recipe(write(tmp_path), environ={variable.name: "anything"}), "any text may be one"
        return
    with pytest.raises(RecipeError, match=f"{variable.name} is 'much', which is invalid: expected {variable.kind}"):
        load_recipe(write(tmp_path), environ={variable.name: "much"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OSWORLD_MAX_TURNS", "0"),
        ("OSWORLD_REPLAY_THRESHOLD", "1.5"),
        ("OSWORLD_TIMEOUT", "-1"),
        ("OSWORLD_TIMEOUT", "inf"),
        ("OSWORLD_HTTP_TIMEOUT", "0"),
        ("OSWORLD_REWARD_ALPHA", "nan"),
        ("OSWORLD_OBS_KEEP_FULL_TURNS", "0"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_name_of_its_variable(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"\(from the environment {name}\)"):
        load_recipe(write(tmp_path), environ={name: text})


def test_truncated_training_turns_are_refused_where_an_episode_is_one_sequence(tmp_path: Path) -> None:
    append, window = write(tmp_path), '[agent]\ncontext_mode = "window"\n'
    with pytest.raises(RecipeError, match=f"{TRUNCATE_TURNS} is 7 and agent.max_turns is 8: samples are not truncated"):
        load_recipe(append, environ={TRUNCATE_TURNS: "7"})
    assert load_recipe(append, environ={TRUNCATE_TURNS: "8"}).agent.max_turns == 8
    assert load_recipe(append, environ={TRUNCATE_TURNS: "2"}, settings=["agent.max_turns=2"]).agent.max_turns == 2
    assert load_recipe(write(tmp_path, window), environ={TRUNCATE_TURNS: "2"}).agent.max_turns == 8


def test_only_our_own_variables_are_read_from_an_environment() -> None:
    assert own_variables({"OSWORLD_TIMEOUT": "1", "HOME": "/root", "OSWORLD_SECRET": "x"}) == {"OSWORLD_TIMEOUT": "1"}


def test_a_setting_may_be_a_bare_word_a_table_or_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "[agent]\nmax_turns = 3\n")
    recipe = load_recipe(path, settings=["agent.dialect=sendkey", "trainer.lora={rank = 2}", "agent.max_turns="])
    assert recipe.agent.dialect == "sendkey"
    assert recipe.trainer.lora is not None
    assert recipe.trainer.lora.rank == 2
    assert recipe.agent.max_turns == 8, "back to the default"
    assert "agent.max_turns" not in recipe.sources
    assert recipe.sources["trainer.lora.rank"] == "command line"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("agent.max_turns", "is not a setting: write key=value"),
        ("=4", "is not a setting"),
        ("name=x", "is not a setting"),
        ("agent.dialect=a b", "text with special characters needs quotes"),
        (
            "agent.max_turms=4",
            r"--set agent.max_turms=4: unknown key `agent.max_turms`; did you mean `agent.max_turns`\?",
        ),
        ("model.hidden_size=small", r"model.hidden_size \(from the command line\)"),
        ("trainer.context_parallel=2", "trainer.context_parallel must be 1: the image tokens"),
    ],
)
def test_a_bad_setting_is_an_error_of_one_sentence_that_names_it(setting: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(write(tmp_path), settings=[setting])


def test_a_file_cannot_set_the_sources_of_its_values(tmp_path: Path) -> None:
    path = tmp_path / "sly.toml"
    path.write_text('[sources]\n"agent.max_turns" = "heaven"\n' + LEAST)
    with pytest.raises(RecipeError, match="sources cannot be set in a file"):
        load_recipe(str(path))


def test_the_resolved_recipe_carries_its_sources_through_json(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), environ={"OSWORLD_TIMEOUT": "5"}, settings=["agent.max_turns=4"])
    again = Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json"))))
    assert again == recipe
    assert again.sources["sft.num_updates"] == "recipe file"
    assert source_lines(again) == [
        "command line: agent.max_turns = 4",
        "environment OSWORLD_TIMEOUT: gspo.episode_timeout_s = 5.0",
    ]
