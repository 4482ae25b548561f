"""`osworld-pipeline`: the pipeline from the command line."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.errors import PipelineError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    recipe: Annotated[str, typer.Option(help="A shipped recipe by name, or a .toml file.")] = "demo",
    state: Annotated[Path, typer.Option(help="The state folder.")] = Path("var"),
) -> None:
    """Materialize every asset on this machine, then print success rates on held-out tasks."""
    from jobs.demo import run_demo
    from osworld_pipeline.definitions import defs

    sys.exit(run_demo(defs, recipe_name=recipe, state_root=state, console=Console()))


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views tasks, replay, episodes, steps, rollout_groups, ...")],
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
    state: Annotated[Path, typer.Option(help="The state folder.")] = Path("var"),
) -> None:
    """Ask the catalog a question in SQL (DuckDB), read-only."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.tables.format import render
    from osworld_pipeline.tables.query import run_query

    print(render(run_query(StateDir(state.resolve()), sql), output))


def main() -> None:
    """Runs the command line; an error of ours is one sentence and status 1."""
    try:
        app()
    except PipelineError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False, markup=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
