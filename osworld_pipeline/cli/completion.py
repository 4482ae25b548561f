"""Values that the shell completes: names of recipes, suites, checkpoints and questions of the cookbook. An error while
reading completes nothing, because a shell shows no message at that moment."""

import os
from collections.abc import Iterable
from pathlib import Path

import click

from osworld_pipeline.domain.state import DEFAULT_STATE, STATE_VARIABLE, StateDir
from osworld_pipeline.errors import PipelineError


def recipes(incomplete: str) -> list[str]:
    from osworld_pipeline.recipes import recipe_names

    files = [path.name for path in Path.cwd().glob("*.toml") if path.name != "pyproject.toml"]
    return _matching([*recipe_names(), *files], incomplete)


def suites(context: click.Context, incomplete: str) -> list[str]:
    from osworld_pipeline.evaluation.suite_files import suite_names

    try:
        return _matching(suite_names(_state(context).suites), incomplete)
    except PipelineError:
        return []


def checkpoints(context: click.Context, incomplete: str) -> list[str]:
    folder = _state(context).checkpoints
    found = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())
    return _matching(found, incomplete)


def cookbook(incomplete: str) -> list[str]:
    from osworld_pipeline.tables.questions.cookbook import COOKBOOK

    return _matching((question.name for question in COOKBOOK), incomplete)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Names that continue a list with commas keep what stands before the last comma."""
    before, comma, start = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(start)]


def _state(context: click.Context) -> StateDir:
    given = context.params.get("state") or os.environ.get(STATE_VARIABLE) or DEFAULT_STATE
    return StateDir(Path(given).resolve())
