"""`report`: the evaluations of some checkpoints as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.options import RecipeOption, SettingsOption, SmokeOption, names_of, recipe_source
from osworld_pipeline.cli.pipeline import StateOption


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    checkpoints: Annotated[str, typer.Option(help="Ids, comma-separated; all there are where none is named.")] = "",
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Write the HTML report of evaluations on the recipe's held-out tasks, and print its path."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.runs.report import make_report, reported_checkpoints
    from resources.tracking import TrackingResource

    folder, loaded = StateDir(state.resolve()), recipe_source(recipe, settings, smoke).load()
    ids = reported_checkpoints(folder, loaded, names_of(checkpoints))
    path = make_report(folder, loaded, checkpoint_ids=ids, tracking_uri=TrackingResource().resolve(folder))
    if as_json:
        tell({"report": path, "checkpoints": ids})
    else:
        print(path)
