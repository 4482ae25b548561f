"""`query` and `cookbook`: SQL over the catalog, and common questions in it."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, StateRemoteOption, existing_state, fresh_state
from osworld_pipeline.cli.shown import say
from osworld_pipeline.programs.answers import print_json


def register(app: typer.Typer) -> None:
    app.command()(query)
    app.command()(cookbook)


def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views tasks, replay, episodes, steps, rollout_groups, ...")],
    fmt: Annotated[str, typer.Option("--format", help="table, json, csv or parquet.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", help="Write to this file instead of the terminal.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Stop the query after this many seconds.")] = 60.0,
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Run a read-only SQL query (DuckDB) on the catalog; it sees one snapshot of the trajectories."""
    from osworld_pipeline.atomic_io import write_file
    from osworld_pipeline.errors import TableError
    from osworld_pipeline.tables.format import answer
    from osworld_pipeline.tables.query import explain_slow
    from osworld_pipeline.tables.slow_query import SLOW_S

    fmt = "json" if as_json else fmt
    if fmt == "parquet" and output is None and sys.stdout.isatty():
        raise TableError("Parquet is binary: give --output FILE, or redirect standard output to a file or a program")
    folder = fresh_state(state, state_remote, as_json=as_json)
    begun_s = time.monotonic()
    data = answer(folder, sql, fmt, timeout_s=timeout_s)
    took_s = time.monotonic() - begun_s
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        write_file(output.resolve(), data)
    if took_s > SLOW_S and not as_json:
        for reason in explain_slow(folder, sql):
            say(f"slow ({took_s:.1f} s): {reason}")


def cookbook(
    name: Annotated[
        str | None, typer.Argument(help="Name of a question; default: list all.", autocompletion=completion.cookbook)
    ] = None,
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
    show_sql: Annotated[bool, typer.Option("--sql", help="Print the query without running it.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole cookbook as Markdown.")] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Common questions about the store: list them, or answer one."""
    from osworld_pipeline.tables.format import render
    from osworld_pipeline.tables.query import run_query
    from osworld_pipeline.tables.questions.cookbook import COOKBOOK, find_question, render_cookbook

    if markdown:
        print(render_cookbook(), end="")
        return
    if name is None and as_json:
        print_json([asdict(question) for question in COOKBOOK])
        return
    if name is None:
        width = max(len(question.name) for question in COOKBOOK)
        for question in COOKBOOK:
            print(f"{question.name:<{width}}  {question.question}")
        return
    question = find_question(name)
    if show_sql and as_json:
        print_json(asdict(question))
        return
    output = "json" if as_json else output
    print(question.sql if show_sql else render(run_query(existing_state(state), question.sql), output))
