"""Typos in the keys of a recipe are all reported at once, each with its place and the key that was perhaps meant."""

from importlib import resources
from pathlib import Path

import pytest

from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.keys import line_of, suggestion, unknown_keys

SMOKE = (resources.files("osworld_pipeline.recipes") / "smoke.toml").read_text()


def error_of(path: Path, text: str, *settings: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_recipe(str(path), settings=settings)
    return str(refused.value).splitlines()


def test_all_typos_of_a_file_and_of_settings_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = SMOKE.replace("[sft]\n", "[sft]\nlerning_rate = 1e-3\n") + "\n[evaluaton]\nseeds = [1]\nsede = 2\n"
    assert error_of(path, text, "gspo.algoritm=grpo", "agent.max_turns=3", "nonsense=1") == [
        f"{path}, line {text.splitlines().index('lerning_rate = 1e-3') + 1}: unknown key `sft.lerning_rate`; did you "
        "mean `sft.learning_rate`?",
        f"{path}, line {text.splitlines().index('[evaluaton]') + 1}: unknown key `evaluaton`; did you mean "
        "`evaluation`?",
        "--set gspo.algoritm=grpo: unknown key `gspo.algoritm`; did you mean `gspo.algorithm`?",
        "--set nonsense=1: unknown key `nonsense`",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gspo.algoritm", "gspo.algorithm"),
        ("gspo.phase1.num_update", "gspo.phase1.num_updates"),
        ("gsop.algorithm", "gspo.algorithm"),
        ("agent.group_size", "gspo.group_size"),
        ("model.hidden_sise", "model.hidden_size"),
    ],
)
def test_the_suggested_key_is_searched_in_the_same_table_and_then_in_the_others(key: str, meant: str) -> None:
    assert suggestion(key) == f"; did you mean `{meant}`?"


def test_a_key_that_is_similar_to_no_other_gets_no_suggestion() -> None:
    assert suggestion("xyzzy") == ""


def test_every_shipped_recipe_has_only_known_keys() -> None:
    assert unknown_keys(load_recipe("demo").model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("[a]\nb = 1\n[c]\nb = 2\n", "c.b", 4),
        ("# [c]\n[ c ] # a table\n  'b' = 2\n", "c.b", 3),
        ("c.b = 2\n", "c.b", 1),
        ("[c]\nd = { b = 1 }\n", "c.d.b", 2),
        ("[c.d]\nb = 1\n", "c.d", 1),
        ("[c]\nb = '''\nx = 1\n'''\n", "c.y", None),
    ],
)
def test_the_line_of_a_key_is_found_in_every_notation(text: str, key: str, line: int | None) -> None:
    assert line_of(text, key) == line
