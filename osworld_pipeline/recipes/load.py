"""Loads a recipe by name: the command line overrides the file, the file the environment, and the environment the
defaults. The source of every value is recorded."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes.environment import VARIABLES, read_variables, refuse_truncation
from osworld_pipeline.recipes.keys import line_of, suggestion, unknown_keys
from osworld_pipeline.recipes.schema import Recipe
from osworld_pipeline.recipes.smoke import shrink

FROM_FILE = "recipe file"
FROM_COMMAND_LINE = "command line"
FROM_SMOKE = "smoke size"
OWN_KEYS = ("name", "sources")
"""Keys that neither files nor settings may give."""
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
_BARE_WORD = re.compile(r"[A-Za-z_][\w./:@-]*")
_KEY = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)*")


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = resources.files("osworld_pipeline.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(
    name_or_path: str,
    *,
    environ: Mapping[str, str] = NO_ENVIRONMENT,
    settings: Sequence[str] = (),
    is_smoke: bool = False,
) -> Recipe:
    """A shipped recipe by name, or a TOML file by path (any name that ends in .toml).

    `environ`: variables of environment.py. `settings`: `key=value` each, the value in TOML, a bare word, or empty for
    the default. `is_smoke`: all stages of the recipe at a size that a laptop runs in a minute or two.

    Raises:
        RecipeError: no such recipe, not TOML, an unknown key, a bad value, or a contradiction. The message names the
            keys, and for a bad value its source if that is not the file.
    """
    name, text = Path(name_or_path).stem, _read(name_or_path)
    data = _read_toml(text, name)
    file = name_or_path if name_or_path.endswith(".toml") else f"recipe {name}"
    _refuse_unknown(data, settings, text=text, file=file)
    return _resolve(data, name, environ, settings, is_smoke)


def parse_recipe(text: str, *, name: str) -> Recipe:
    """A recipe from its TOML alone. Raises RecipeError."""
    data = _read_toml(text, name)
    _refuse_unknown(data, (), text=text, file=f"recipe {name}")
    return _resolve(data, name, NO_ENVIRONMENT, (), is_smoke=False)


def source_lines(recipe: Recipe) -> list[str]:
    """The values from the command line and the environment: one line for each source, with its keys in order."""
    by_source: dict[str, list[str]] = {}
    dumped = recipe.model_dump(mode="json")
    for key, source in sorted(recipe.sources.items()):
        if source not in (FROM_FILE, FROM_SMOKE):
            by_source.setdefault(source, []).append(f"{key} = {_get(dumped, key)!r}")
    return [f"{source}: {', '.join(keys)}" for source, keys in sorted(by_source.items())]


def _read(name_or_path: str) -> str:
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(f"no recipe at {path}")
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"recipe {path} is not UTF-8 text: {error}") from error
    return recipe_text(name_or_path)


def recipe_text(name: str) -> str:
    """The file of a shipped recipe. Raises RecipeError."""
    if name not in recipe_names():
        raise RecipeError(
            f"no recipe named '{name}'; there are: {', '.join(recipe_names())}; or give a .toml file"
            + did_you_mean(name, recipe_names())
        )
    return (resources.files("osworld_pipeline.recipes") / f"{name}.toml").read_text(encoding="utf-8")


def _read_toml(text: str, name: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"recipe {name} is not TOML: {error}") from error
    for key in OWN_KEYS:
        if key in data:
            raise RecipeError(f"recipe {name}: {key} cannot be set in a file: remove it")
    return data


def _refuse_unknown(data: Mapping[str, Any], settings: Sequence[str], *, text: str, file: str) -> None:
    """Raises RecipeError that names every unknown key of the file, with its line of `text`, and of the settings."""
    found: list[str] = []
    for key in unknown_keys(data):
        line = line_of(text, key)
        where = file if line is None else f"{file}, line {line}"
        found.append(f"{where}: unknown key `{key}`{suggestion(key)}")
    for setting in settings:
        key, value = _parse_setting(setting)
        nested: dict[str, Any] = {}
        _set(nested, key, value)
        found += [f"--set {setting}: unknown key `{one}`{suggestion(one)}" for one in unknown_keys(nested)]
    if found:
        raise RecipeError("\n".join(found))


def _resolve(
    data: dict[str, Any], name: str, environ: Mapping[str, str], settings: Sequence[str], is_smoke: bool
) -> Recipe:
    sources = {key: FROM_FILE for key, _ in _leaves(data)}
    values = read_variables(environ)
    for variable in VARIABLES:
        if variable.name in values and variable.key is not None and variable.key not in sources:
            _set(data, variable.key, values[variable.name])
            sources[variable.key] = f"environment {variable.name}"
    if is_smoke:
        recipe = _validated(data, name, sources)
        full = dict(_leaves(recipe.model_dump(mode="json")))
        data = shrink(recipe).model_dump(mode="json", exclude=set(OWN_KEYS))
        small = dict(_leaves(data))
        sources = {key: source for key, source in sources.items() if key in small}
        sources |= {key: FROM_SMOKE for key, value in small.items() if full.get(key) != value}
    for setting in settings:
        key, value = _parse_setting(setting)
        for old in [old for old in sources if old == key or old.startswith(f"{key}.")]:
            del sources[old]
        if value is None:
            _remove(data, key)
            continue
        _set(data, key, value)
        sources |= {f"{key}.{leaf}" if leaf else key: FROM_COMMAND_LINE for leaf, _ in _leaves(value)}
    recipe = _validated(data, name, sources)
    refuse_truncation(recipe, values)
    return recipe


def _validated(data: Mapping[str, Any], name: str, sources: Mapping[str, str]) -> Recipe:
    try:
        return Recipe.model_validate({"name": name, "sources": sources, **data})
    except ValidationError as error:
        first = error.errors()[0]
        # Between `model` and its key pydantic names the kind of model, which is not a key.
        parts = [str(part) for index, part in enumerate(first["loc"]) if (index, first["loc"][0]) != (1, "model")]
        where = ".".join(parts)
        source = sources.get(where, FROM_FILE)
        given = "" if source == FROM_FILE else f" (from the {source})"
        what = first["msg"].removeprefix("Value error, ")
        raise RecipeError(f"recipe {name}: {where}{given}: {what}" if where else f"recipe {name}: {what}") from error


def _parse_setting(setting: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not equals or not _KEY.fullmatch(key) or key in OWN_KEYS:
        raise RecipeError(f"'{setting}' is not a setting: write key=value, e.g. agent.max_turns=4")
    if not text:
        return key, None
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if _BARE_WORD.fullmatch(text):
            return key, text
        raise RecipeError(
            f"the value of '{setting}' is not TOML ({error}): text with special characters needs quotes"
        ) from error


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key; a list is a value. A value that is not a table is returned under `prefix`."""
    if not isinstance(data, Mapping):
        yield prefix, data
        return
    for key, value in data.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else key)


def _get(data: Mapping[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        below = data.get(table)
        if not isinstance(below, dict):
            below = data[table] = {}
        data = below
    data[last] = value


def _remove(data: dict[str, Any], key: str) -> None:
    """Raises RecipeError if `key` is below a value."""
    *tables, last = key.split(".")
    for table in tables:
        below = data.get(table, {})
        if not isinstance(below, dict):
            raise RecipeError(f"there is no key {key}: {table} has a value, and is not a table")
        data = below
    data.pop(last, None)
