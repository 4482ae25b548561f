"""A table of the configuration file: a frozen model whose fields state their default, their meaning and their command
line option. The file's example and the help are generated from them."""

import argparse
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Table(BaseModel):
    """Every field has a default; the docstring below a field is its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Option:
    """Marks a field that has a command line option. Without `parse` the option's type is that of the field: a flag for
    a bool, choices for a Literal."""

    flag: str = ""
    """Empty for the field's name."""
    metavar: str = ""
    """Name of the value in the help; empty for the field's name."""
    parse: Callable[[str], Any] | None = None
    choices: Callable[[], Iterable[str]] | None = None


def add_options(parser: Any, table: type[Table], name: str = "") -> None:
    """Adds the options of a table; those that are not given are not in the parsed arguments.

    `parser`: of argparse, or a group of it; `name`: the table's name in the file; empty for the top level.
    """
    for key, field, option in _options(table):
        parser.add_argument(
            option.flag or f"--{key.replace('_', '-')}",
            dest=f"{name}.{key}" if name else key,
            default=argparse.SUPPRESS,
            help=f"{meaning(field)}{_default(field)}".replace("%", "%%"),
            **_reading(key, field, option),
        )


def meaning(field: FieldInfo) -> str:
    """The docstring of a field on one line."""
    return " ".join((field.description or "").split())


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The choices of a Literal, or of the option; else empty."""
    chosen = next((one.choices for one in field.metadata if isinstance(one, Option) and one.choices), None)
    kind = _value_type(field)
    return tuple(chosen()) if chosen else get_args(kind) if get_origin(kind) is Literal else ()


def _value_type(field: FieldInfo) -> Any:
    """The annotation without None."""
    kind = field.annotation
    if get_origin(kind) is types.UnionType:
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _options(table: type[Table]) -> Iterator[tuple[str, FieldInfo, Option]]:
    for key, field in table.model_fields.items():
        for option in field.metadata:
            if isinstance(option, Option):
                yield key, field, option


def _reading(key: str, field: FieldInfo, option: Option) -> dict[str, Any]:
    """How argparse reads the value."""
    kind = _value_type(field)
    if kind is bool:
        return {"action": "store_true"}
    if choices := choices_of(field):
        return {"choices": choices}
    assert option.parse or kind in (int, float, str, Path), f"{key}: the option needs a function that reads it"
    return {"type": option.parse or kind, "metavar": option.metavar or key.upper()}


def _default(field: FieldInfo) -> str:
    value = field.default
    return f" (default {value})" if isinstance(value, int | float | str | Path) and not isinstance(value, bool) else ""
