"""The valid keys of a recipe, from its schema, and the unknown keys of a file or a setting."""

import re
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from osworld_pipeline.recipes.schema import Recipe
from osworld_pipeline.recipes.section import Section

_HEADER = re.compile(r"\s*\[{1,2}\s*(?P<table>[\w.\s\"'-]+?)\s*\]{1,2}\s*(#.*)?")
_PAIR = re.compile(r"\s*(?P<key>[\w.\s\"'-]+?)\s*=")


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Every table of a recipe by dotted name; two kinds of model share one name."""
    yield from _sections_of(Recipe, "")


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key that is a value, by dotted name."""
    for prefix, section in sections():
        for name, field in section.model_fields.items():
            if not list(section_types(field.annotation)):
                yield f"{prefix}.{name}", field


def _sections_of(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        for below in section_types(field.annotation):
            dotted = f"{prefix}.{name}" if prefix else name
            yield dotted, below
            yield from _sections_of(below, dotted)


def section_types(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from section_types(argument)


def unknown_keys(data: Mapping[str, Any]) -> list[str]:
    """Unknown dotted keys of `data`, in order; for an unknown table only its name."""
    return list(_unknown(data, ""))


def suggestion(key: str) -> str:
    """`; did you mean `gspo.algorithm`?`, for the end of a clause; empty if no key is similar."""
    known = _known()
    table, _, name = key.rpartition(".")
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == table}
    near = get_close_matches(name, siblings, n=1, cutoff=0.6)
    found = siblings[near[0]] if near else next((one for one in known if one.rpartition(".")[2] == name), None)
    if found is None:
        found = next(iter(get_close_matches(key, known, n=1, cutoff=0.8)), None)
    return f"; did you mean `{found}`?" if found else ""


def line_of(text: str, key: str) -> int | None:
    """The line (from 1) of a TOML text that sets `key` or its table; None if not found."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if (header := _HEADER.fullmatch(line)) is not None:
            table = _plain(header["table"])
            given = table
        elif (pair := _PAIR.match(line)) is not None:
            given = f"{table}.{_plain(pair['key'])}" if table else _plain(pair["key"])
        else:
            continue
        # The key itself, its table, or an inline table with it.
        if given == key or given.startswith(f"{key}.") or (f"{given}." == key[: len(given) + 1] and "{" in line):
            return number
    return None


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _unknown(data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known = _known()
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else name
        if key not in known:
            yield key
        elif known[key] and isinstance(value, Mapping):
            yield from _unknown(value, key)


@lru_cache(maxsize=1)
def _known() -> Mapping[str, bool]:
    """Dotted names of keys, and whether each is a table."""
    tables = {name: True for name, _ in sections()}
    top = {name: False for name, field in Recipe.model_fields.items() if name not in tables}
    return {**top, **dict.fromkeys((name for name, _ in keys()), False), **tables}
