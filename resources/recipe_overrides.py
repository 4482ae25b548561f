"""The keys of a recipe as typed configuration, so that Dagster's launchpad completes them and checks their types. Built
from the recipe's schema; ranges and contradictions are checked when the recipe is loaded."""

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import dagster as dg
from pydantic import BaseModel, Field, create_model

from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import OWN_KEYS


def settings_of(overrides: BaseModel | None) -> list[str]:
    """The given keys as settings of `load_recipe`: `key=value` with the value in TOML."""
    return [f"{key}={_toml(value)}" for key, value in _given(overrides, "")]


def _given(section: BaseModel | None, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section or ():
        if isinstance(value, BaseModel):
            yield from _given(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _toml(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _configuration(name: str, sections: Sequence[type[BaseModel]]) -> type[dg.Config]:
    """All keys of the sections, each optional; several sections are the choices of one key."""
    annotations: dict[str, list[Any]] = {}
    descriptions: dict[str, str] = {}
    for section in sections:
        for key, field in section.model_fields.items():
            if section is not Recipe or key not in OWN_KEYS:
                annotations.setdefault(key, []).append(field.annotation)
                descriptions.setdefault(key, field.description or "")
    fields: dict[str, Any] = {
        key: (_type(f"{name}_{key}", found) | None, Field(default=None, description=descriptions[key]))
        for key, found in annotations.items()
    }
    return create_model(name, __base__=dg.Config, **fields)


def _type(name: str, annotations: Sequence[Any]) -> Any:
    choices = [choice for annotation in annotations for choice in _choices(annotation)]
    sections = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
    if sections:
        return _configuration(name, sections)
    if get_origin(choices[0]) is Literal:
        words = dict.fromkeys(word for choice in choices for word in get_args(choice))
        return Enum(name, {word: word for word in words})
    if get_origin(choices[0]) is tuple:
        return list[get_args(choices[0])[0]]
    if choices[0] == Mapping[str, str]:
        return dict[str, str]
    return choices[0]


def _choices(annotation: Any) -> list[Any]:
    """The types of a union, without None."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return [part for part in parts if part is not type(None)]


if TYPE_CHECKING:
    Overrides = dg.Config
else:
    Overrides = _configuration("recipe", [Recipe])
"""Every key of a recipe; None if it is not given."""
