"""`query`: SQL over the catalog."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateRemoteOption, fresh_state
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.state import STATE_VARIABLE

StateOption = Annotated[Path, typer.Option(envvar=STATE_VARIABLE, help="The state folder.")]


def register(app: typer.Typer) -> None:
    app.command()(query)


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
