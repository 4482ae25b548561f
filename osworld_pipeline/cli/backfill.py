"""`backfill`: evaluate any checkpoints on any suites, and rank them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.options import names_of
from osworld_pipeline.cli.pipeline import StateOption
from osworld_pipeline.cli.shown import ScoreLine, counted, say, show_scores


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
    state: StateOption = Path("var"),
) -> None:
    """Evaluate checkpoints on suites, one Dagster run each; what is finished is not run again, so an interrupted
    backfill goes on where it ended."""
    chosen, wanted = names_of(checkpoints), list(dict.fromkeys(names_of(suites)))
    who = ", ".join(chosen) or "every checkpoint"
    say(f"backfill: {who} on {', '.join(wanted)}, as recipe {recipe} says", as_json=as_json)
    from jobs.backfill import run_backfill
    from osworld_pipeline.definitions import defs, environment
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.runs.evaluation_plan import load_suite
    from osworld_pipeline.runs.registered import all_checkpoints
    from resources.state import RecipeResource

    source = RecipeResource(name=recipe, settings=settings or [], smoke=smoke, environment=environment)
    folder, loaded = StateDir(state.resolve()), source.load()
    num_tasks = sum(len(load_suite(folder, loaded, name).tasks) for name in wanted)
    num_seeds, num_checkpoints = len(loaded.evaluation.seeds), len(set(chosen)) or len(all_checkpoints(folder))
    say(
        f"{counted(num_checkpoints * num_tasks * num_seeds, 'episode')} ({counted(num_checkpoints, 'checkpoint')}, "
        f"{counted(num_tasks, 'task')}, {counted(num_seeds, 'seed')}); what is finished is not run again",
        as_json=as_json,
    )
    rows = run_backfill(
        defs,
        source=source,
        state_root=state,
        checkpoint_ids=chosen,
        suites=wanted,
        console=Console(stderr=as_json),
    )
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    lines = [
        ScoreLine(
            suite=row["suite"],
            checkpoint=row["checkpoint_id"],
            success=row["lenient_success"],
            interval=(row["lenient_low"], row["lenient_high"]),
            strict=row["strict_success"],
            num_success=row["lenient_successes"],
            num_valid=row["lenient_n"],
            num_faults=row["num_faults"],
        )
        for row in rows
    ]
    show_scores(lines, Console())
