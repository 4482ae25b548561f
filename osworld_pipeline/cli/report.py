"""`report`: evaluations, one training run, or one suite's leaderboard, each as an HTML page."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import (
    CheckpointsOption,
    RecipeOption,
    SettingsOption,
    SmokeOption,
    StateOption,
    StateRemoteOption,
    fresh_state,
    names_of,
    recipe_source,
)
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.cli.shown import counted, say
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.recipes import Recipe


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    checkpoints: CheckpointsOption = "",
    training: Annotated[
        str,
        typer.Option(
            help="Report on one training run: name one of its checkpoints, or a stage (gspo_phase1) for its newest run."
        ),
    ] = "",
    suite: Annotated[
        str, typer.Option(help="Leaderboard of the suite with this name.", autocompletion=completion.suites)
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All pages, and their index.")] = False,
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report and print its path: of evaluations on the recipe's held-out tasks, of one training run
    (--training), of one suite (--suite), or all of them (--all)."""
    if sum(map(bool, (training, suite, everything))) > 1:
        raise typer.BadParameter("--training, --suite and --all each select the report: give one of them")
    if checkpoints and (training or suite):
        raise typer.BadParameter("--checkpoints applies only to the report of evaluations and to --all")
    from osworld_pipeline.runs.checkpoints.registry import all_checkpoints
    from osworld_pipeline.runs.evaluate import report as made
    from resources.deployment import deployment_tracking

    folder = fresh_state(state, state_remote, as_json=as_json)
    uri = deployment_tracking(os.environ).resolve(folder)
    if training:
        stage_key = made.find_stage(folder, training)
        with shown_progress("writing the page", as_json=as_json):
            path = made.make_training_report(folder, stage_key, tracking_uri=uri, say=say)
        _answer([path], {"report": path, "stage_key": stage_key}, as_json)
        return
    source = recipe_source(recipe, settings, smoke)
    loaded = source.load()
    if suite:
        with shown_progress("writing the page", as_json=as_json):
            path = made.make_suite_report(folder, loaded, suite, recipe_options=source.options)
        _answer([path], {"report": path, "suite": suite}, as_json)
        return
    if everything:
        ids = names_of(checkpoints) or [checkpoint.checkpoint_id for checkpoint in all_checkpoints(folder)]
        stages = [made.find_stage(folder, one) for one in names_of(checkpoints)] or made.training_stages(folder)
        paths = _make_all(folder, loaded, ids, stages, tracking_uri=uri, as_json=as_json)
        _answer(paths, {"reports": paths, "checkpoints": ids}, as_json)
        return
    with shown_progress("writing the page", as_json=as_json):
        ids = made.reported_checkpoints(folder, loaded, names_of(checkpoints), recipe_options=source.options)
        path = made.make_report(folder, loaded, checkpoint_ids=ids, tracking_uri=uri, say=say)
    _answer([path], {"report": path, "checkpoints": ids}, as_json)


def _make_all(
    folder: "StateDir", recipe: "Recipe", ids: list[str], stages: list[str], *, tracking_uri: str, as_json: bool
) -> list[Path]:
    """Writes every page and then their index, with a line on standard error for each."""
    from osworld_pipeline.runs.evaluate import report as made

    begun_s = time.monotonic()
    say(f"pages of evaluations, of suites, and of {counted(len(stages), 'training run')}", as_json=as_json)
    with shown_progress("writing pages", as_json=as_json):
        return made.make_all_reports(
            folder, recipe, checkpoint_ids=ids, stage_keys=stages, tracking_uri=tracking_uri, say=say,
            on_page=lambda path: say(f"{time.monotonic() - begun_s:6.1f} s  {path.name}", as_json=as_json),
        )  # fmt: skip


def _answer(paths: list[Path], answer: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        for path in paths:
            print(path)
