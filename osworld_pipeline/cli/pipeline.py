"""`demo` and `query`: run the whole pipeline here, and ask what came of it."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption, tell

if TYPE_CHECKING:
    from jobs.demo import DemoEnd

StateOption = Annotated[Path, typer.Option(help="The state folder.")]


def register(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(query)


def demo(
    recipe: Annotated[str, typer.Option(help="A shipped recipe by name, or a .toml file.")] = "demo",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, as agent.max_turns=4; wins over the recipe. May be given often."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The recipe's road at the smallest size.")] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Materialize every asset on this machine, then print success rates on held-out tasks."""
    from jobs.demo import run_demo
    from osworld_pipeline.definitions import defs, environment
    from resources.state import RecipeResource

    source = RecipeResource(name=recipe, settings=settings or [], smoke=smoke, environment=environment)
    # Bars and tables are for people: with --json they go to standard error.
    ended = run_demo(defs, source=source, state_root=state, console=Console(stderr=as_json))
    if as_json:
        _tell_demo(state, source.load().evaluation.confidence, ended)
    sys.exit(ended.status)


def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views tasks, replay, episodes, steps, rollout_groups, ...")],
    fmt: Annotated[str, typer.Option("--format", help="table, json, csv or parquet.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", help="Write to this file, not to the terminal.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Stop the query after so many seconds.")] = 60.0,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Ask the catalog a question in SQL (DuckDB), read-only; it sees the trajectories of one moment."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.durable import write_file
    from osworld_pipeline.errors import TableError
    from osworld_pipeline.tables.format import answer

    fmt = "json" if as_json else fmt
    if fmt == "parquet" and output is None and sys.stdout.isatty():
        raise TableError("Parquet is no text: give --output FILE, or send standard output to a file or a program")
    data = answer(StateDir(state.resolve()), sql, fmt, timeout_s=timeout_s)
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        write_file(output.resolve(), data)


def _tell_demo(state: Path, confidence: float, ended: "DemoEnd") -> None:
    """Scores of every evaluation in the state, this run's among them; what changed, and what replay contributed."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.evaluation.scores import read_scores

    scores = [
        {**asdict(score), "success_rate": score.success_rate}
        for score in read_scores(StateDir(state.resolve()), confidence=confidence)
    ]
    changes = [change.fields() for change in ended.changes]
    tell({"state": state, "ok": ended.status == 0, "scores": scores, "changes": changes, "replay": ended.replay})
