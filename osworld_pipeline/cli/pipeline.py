"""`demo` and `query`: run the whole pipeline here, and ask what came of it."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

StateOption = Annotated[Path, typer.Option(help="The state folder.")]


def register(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(query)


def demo(
    recipe: Annotated[str, typer.Option(help="A shipped recipe by name, or a .toml file.")] = "demo",
    state: StateOption = Path("var"),
) -> None:
    """Materialize every asset on this machine, then print success rates on held-out tasks."""
    from jobs.demo import run_demo
    from osworld_pipeline.definitions import defs

    sys.exit(run_demo(defs, recipe_name=recipe, state_root=state, console=Console()))


def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views tasks, replay, episodes, steps, rollout_groups, ...")],
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
    state: StateOption = Path("var"),
) -> None:
    """Ask the catalog a question in SQL (DuckDB), read-only."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.tables.format import render
    from osworld_pipeline.tables.query import run_query

    print(render(run_query(StateDir(state.resolve()), sql), output))
