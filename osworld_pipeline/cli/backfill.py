"""`backfill`: evaluate any checkpoints on any suites, and rank them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import CheckpointsOption, RecipeOption, StateOption, names_of, recipe_source
from osworld_pipeline.cli.shown import ScoreLine, planned_evaluations, say, show_scores
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from osworld_pipeline.evaluation.suite_files import EvalSuite


def register(app: typer.Typer) -> None:
    app.command()(backfill)


def backfill(
    checkpoints: CheckpointsOption = "",
    suites: Annotated[str, typer.Option(help="Names, comma-separated.", autocompletion=completion.suites)] = "heldout",
    recipe: RecipeOption = "demo",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, e.g. evaluation.temperature=0.6; overrides the recipe."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The recipe at its smallest size.")] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Evaluate checkpoints on suites, one Dagster run each. Finished evaluations are not repeated, so an interrupted
    backfill continues."""
    chosen, wanted = names_of(checkpoints), list(dict.fromkeys(names_of(suites)))
    from osworld_pipeline.cli.in_process.backfill import run_backfill
    from osworld_pipeline.definitions import defs

    source = recipe_source(recipe, settings, smoke)
    num_seeds = len(source.load().evaluation.seeds)

    def on_start(checkpoint_ids: "Sequence[str]", on: "Sequence[EvalSuite]") -> None:
        planned = planned_evaluations(
            checkpoint_ids,
            ", ".join(one.name for one in on),
            recipe=recipe,
            num_tasks=sum(len(one.tasks) for one in on),
            num_seeds=num_seeds,
        )
        say(f"backfill: {planned}", as_json=as_json)

    rows = run_backfill(
        defs,
        source=source,
        state_root=state,
        checkpoint_ids=chosen,
        suites=wanted,
        console=Console(stderr=as_json),
        on_start=on_start,
    )
    if as_json:
        print_json(rows)
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
