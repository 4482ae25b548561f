"""`backfill`: evaluate any checkpoints on any suites, and rank them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def register(app: typer.Typer) -> None:
    app.command()(backfill)


def backfill(
    checkpoints: Annotated[str, typer.Option(help="Ids, comma-separated; all there are where none is named.")] = "",
    suites: Annotated[str, typer.Option(help="Names, comma-separated.")] = "heldout",
    recipe: Annotated[str, typer.Option(help="How it is evaluated: a shipped recipe, or a .toml file.")] = "demo",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, as evaluation.temperature=0.6; wins over the recipe."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The recipe at its smallest size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Scores as JSON; bars go to standard error.")] = False,
    state: Annotated[Path, typer.Option(help="The state folder.")] = Path("var"),
) -> None:
    """Evaluate checkpoints on suites, one Dagster run each; what is finished is not run again, so an interrupted
    backfill goes on where it ended."""
    from jobs.backfill import run_backfill
    from osworld_pipeline.definitions import defs, environment
    from resources.state import RecipeResource

    source = RecipeResource(name=recipe, settings=settings or [], smoke=smoke, environment=environment)
    rows = run_backfill(
        defs,
        source=source,
        state_root=state,
        checkpoint_ids=_names(checkpoints),
        suites=_names(suites),
        console=Console(stderr=as_json),
    )
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    table = Table("suite", "checkpoint", "success", "interval", "strict", "n", "faults")
    for row in rows:
        table.add_row(
            row["suite"],
            row["checkpoint_id"],
            _percent(row["lenient_success"]),
            f"{_percent(row['lenient_low'])} - {_percent(row['lenient_high'])}",
            _percent(row["strict_success"]),
            f"{row['lenient_successes']}/{row['lenient_n']}",
            str(row["num_faults"]),
        )
    Console().print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
