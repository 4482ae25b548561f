"""Generates docs/recipes.md from the schema: every key with type, default, bounds and meaning, the environment
variables, and the invalid combinations. `python -m osworld_pipeline.recipes.describe > docs/recipes.md`"""

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from osworld_pipeline.recipes.contradictions import CONTRADICTIONS
from osworld_pipeline.recipes.environment import VARIABLES
from osworld_pipeline.recipes.keys import keys, section_types, sections
from osworld_pipeline.recipes.load import recipe_names, recipe_text
from osworld_pipeline.recipes.section import Section

HEAD = """# Recipes
A run is one recipe: a TOML file under `osworld_pipeline/recipes/`, or any other by its path. This page is generated
from the schema (`python -m osworld_pipeline.recipes.describe > docs/recipes.md`).

A key is read from four sources, in this order: the command line (`osworld-pipeline train --recipe NAME --set
agent.max_turns=4`, the value in TOML; an empty one returns to the default), the recipe's file, the environment, the
default. Unknown keys are refused. The resolved recipe, with the source of each value, is saved with every finished
checkpoint of a stage (`checkpoint.json`); the run's log lists the values from the command line and the environment.
`--smoke` runs all stages of a recipe at a size that a laptop finishes in a minute or two: a tiny model, few tasks and
updates; dialect, context, rollout mode, algorithm, reward, replay and adapters stay the recipe's own."""
SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


def describe() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD, _recipes(), "## Keys"]
    parts += [_section_text(name, section) for name, section in sections()]
    parts += [_variables(), _contradictions()]
    return "\n\n".join(parts) + "\n"


def _section_text(name: str, section: type[Section]) -> str:
    lines = [f"### [{name}]{_kind_of(section)}", _flat(inspect.getdoc(section) or ""), "", *_rows_head()]
    variables = {variable.key: variable.name for variable in VARIABLES}
    for key, field in section.model_fields.items():
        if list(section_types(field.annotation)):
            continue
        meaning = _flat(field.description or "")
        if (variable := variables.get(f"{name}.{key}")) is not None:
            meaning += f" (`{variable}`)"
        lines.append(f"| `{key}` | {_type_text(field.annotation)} | {_default(field)} | {_bounds(field)} | {meaning} |")
    return "\n".join(lines)


def _kind_of(section: type[Section]) -> str:
    """The kind that distinguishes two tables with the same name."""
    kind = section.model_fields.get("kind")
    if kind is None or not kind.is_required():
        return ""
    return f' with kind = "{get_args(kind.annotation)[0]}"'


def _rows_head() -> list[str]:
    return ["| key | type | default | bounds | meaning |", "|---|---|---|---|---|"]


def _type_text(annotation: Any) -> str:
    if annotation is type(None):
        return "nothing"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type_text(argument) for argument in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_type_text(get_args(annotation)[0])}"
    if get_origin(annotation) is Mapping:
        return "table"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value) or "empty"
    return "empty" if value in ("", {}) else f"`{value}`"


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for kind, name, sign in SIGNS
        if isinstance(bound, kind)
    ]
    return ", ".join(found)


def _recipes() -> str:
    lines = ["## Shipped recipes", "| recipe | description |", "|---|---|"]
    for name in recipe_names():
        lines.append(f"| `{name}` | {head_comment(name)} |")
    return "\n".join(lines)


def head_comment(name: str) -> str:
    """The comment at the head of a shipped recipe; empty if it has none."""
    match = re.match(r"(?:#[^\n]*\n)+", recipe_text(name))
    return _flat(re.sub(r"^# ?", "", match[0], flags=re.MULTILINE)) if match else ""


def _variables() -> str:
    lines = [
        "## Environment",
        "Slime-OSWorld's names. A bad value is refused with the variable's name, also if the file gives the key.",
        "",
        "| variable | key | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    fields: Mapping[str, FieldInfo] = dict(keys())
    for one in VARIABLES:
        key, default = (f"`{one.key}`", _default(fields[one.key])) if one.key else ("", "")
        lines.append(f"| `{one.name}` | {key} | {one.kind} | {default} | {one.meaning} |")
    return "\n".join(lines)


def _contradictions() -> str:
    return "\n".join(["## Invalid combinations", *(f"- {_flat(one.sentence)}" for one in CONTRADICTIONS)])


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(describe(), end="")
