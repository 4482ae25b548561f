"""What users of a version depend on, as JSON: columns with their types, commands with their options, keys of recipes,
and HTTP requests of the env server."""

import re
from typing import Any

import click
import typer

from env_server.describe_api import describe
from osworld_pipeline.cli import app
from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES, SCHEMA_VERSION
from osworld_pipeline.recipes.keys import keys

_REQUEST = re.compile(r"^### `?((?:GET|POST|PUT|PATCH|DELETE) /\S*?)`?$", re.MULTILINE)


def surface() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "columns": {
            f"{table}.{field.name}": str(field.type)
            for table, schema in {**PART_TABLES, **OWNED_TABLES}.items()
            for field in schema
        },
        "options": sorted(_options(typer.main.get_command(app), "osworld-pipeline")),
        "recipe_keys": sorted(name for name, _ in keys()),
        "requests": sorted(_REQUEST.findall(describe())),
    }


def _options(command: click.Command, path: str) -> list[str]:
    names = [
        f"{path} {name}" for one in command.params for name in (*one.opts, *one.secondary_opts) if name != "--help"
    ]
    below = command.commands.items() if isinstance(command, click.Group) else ()
    return [path, *names, *(name for word, one in below for name in _options(one, f"{path} {word}"))]
