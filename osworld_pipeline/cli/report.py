"""`report`: evaluations, one training run, or one suite's leaderboard, each as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.options import RecipeOption, SettingsOption, SmokeOption, names_of, recipe_source
from osworld_pipeline.cli.pipeline import StateOption


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    checkpoints: Annotated[str, typer.Option(help="Ids, comma-separated; all there are where none is named.")] = "",
    training: Annotated[
        str, typer.Option(help="Of one training run: a checkpoint it made, or a stage, as gspo_phase1, for the newest.")
    ] = "",
    suite: Annotated[str, typer.Option(help="Of one suite by name: its leaderboard.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every page there can be, and their index.")] = False,
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report and print its path: of evaluations on the recipe's held-out tasks, of one training run
    (--training), of one suite (--suite), or all of them (--all)."""
    if sum(map(bool, (training, suite, everything))) > 1:
        raise typer.BadParameter("--training, --suite and --all each name what to report: give one of them")
    if checkpoints and (training or suite):
        raise typer.BadParameter("--checkpoints chooses what stands in the report of evaluations, and in --all")
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.runs import report as made
    from osworld_pipeline.runs.registered import all_checkpoints
    from resources.tracking import TrackingResource

    folder = StateDir(state.resolve())
    uri = TrackingResource().resolve(folder)
    if training:
        stage_key = made.find_stage(folder, training)
        path = made.make_training_report(folder, stage_key, tracking_uri=uri, say=_warn)
        _answer([path], {"report": path, "stage_key": stage_key}, as_json)
        return
    loaded = recipe_source(recipe, settings, smoke).load()
    if suite:
        path = made.make_suite_report(folder, loaded, suite)
        _answer([path], {"report": path, "suite": suite}, as_json)
        return
    if everything:
        ids = names_of(checkpoints) or [checkpoint.checkpoint_id for checkpoint in all_checkpoints(folder)]
        stages = [made.find_stage(folder, one) for one in names_of(checkpoints)] or made.training_stages(folder)
        paths = made.make_all_reports(
            folder, loaded, checkpoint_ids=ids, stage_keys=stages, tracking_uri=uri, say=_warn
        )
        _answer(paths, {"reports": paths, "checkpoints": ids}, as_json)
        return
    ids = made.reported_checkpoints(folder, loaded, names_of(checkpoints))
    path = made.make_report(folder, loaded, checkpoint_ids=ids, tracking_uri=uri, say=_warn)
    _answer([path], {"report": path, "checkpoints": ids}, as_json)


def _answer(paths: list[Path], answer: dict[str, object], as_json: bool) -> None:
    if as_json:
        tell(answer)
    else:
        for path in paths:
            print(path)


def _warn(sentence: str) -> None:
    Console(stderr=True).print(sentence, highlight=False, markup=False)
