"""`checkpoint add` and `checkpoint list`: checkpoints to evaluate, train further and compare."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, existing_state, writable_state
from osworld_pipeline.cli.shown import show_table
from osworld_pipeline.programs.answers import print_json

checkpoints = typer.Typer(help="List checkpoints, and add external ones.", no_args_is_help=True, suggest_commands=False)


def register(app: typer.Typer) -> None:
    app.add_typer(checkpoints, name="checkpoint")


@checkpoints.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder (Hugging Face format, or peft's), hub:OWNER/NAME[@REVISION], or http(s)://host/v1#model."
        ),
    ],
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Add an external model as a checkpoint. Nothing is copied; its id is derived from its content."""
    from osworld_pipeline.runs.checkpoints.external import add_checkpoint
    from osworld_pipeline.runs.checkpoints.ids import checkpoint_card
    from osworld_pipeline.tables.catalog import rebuild_catalog

    folder = writable_state(state, must_exist=False)
    with Console(stderr=True).status("reading its weights"):
        checkpoint = add_checkpoint(folder, source)
        rebuild_catalog(folder)
    if as_json:
        print_json(checkpoint_card(checkpoint))
    else:
        print(f"{checkpoint.checkpoint_id}  {checkpoint.path}")


@checkpoints.command("list")
def list_(state: StateOption = Path("var"), as_json: JsonOption = False) -> None:
    """All checkpoints, parents before children."""
    from osworld_pipeline.runs.checkpoints.ids import checkpoint_card
    from osworld_pipeline.runs.checkpoints.registry import all_checkpoints

    found = all_checkpoints(existing_state(state))
    if as_json:
        print_json([checkpoint_card(checkpoint) for checkpoint in found])
        return
    rows = [
        {
            "checkpoint": one.checkpoint_id,
            "stage": str(one.stage),
            "updates": str(one.num_updates),
            "parent": one.parent_id or "-",
            "path": one.path,
        }
        for one in found
    ]
    show_table(rows, Console(), spare=["path", "stage"])
