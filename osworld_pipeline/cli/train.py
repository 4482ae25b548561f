"""`train` and `demo`: train the stages of a recipe on this machine, then evaluate their checkpoints."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import RecipeOption, SettingsOption, SmokeOption, StateOption, recipe_source
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.cli.in_process.train import TrainEnd, TrainRequest
    from resources.state import RecipeResource


def register(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(train)


def demo(
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="All stages of the recipe at the smallest size.")] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Materialize every asset on this machine, then print success rates on held-out tasks."""
    from osworld_pipeline.cli.in_process.train import TrainRequest

    _run("demo", recipe_source(recipe, settings, smoke), state, TrainRequest(), as_json=as_json)


def train(
    recipe: RecipeOption,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Train this checkpoint: an id, champion, a folder, or hub:OWNER/NAME[@REVISION]. Without --stages, "
            "the flywheel and the GSPO phases are run.",
        ),
    ] = "",
    stages: Annotated[
        str,
        typer.Option(help="Comma-separated: base, sft, flywheel, gspo_phase1, gspo_phase2; default: all."),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the required resources without starting. Exit status 1 if the recipe does not fit."
        ),
    ] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="With --dry-run: GB of one GPU to plan for; default: the local GPUs.")
    ] = None,
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Train a recipe's stages on this machine and evaluate every checkpoint. Finished work is not repeated."""
    from osworld_pipeline.cli.in_process.train import TrainRequest

    source = recipe_source(recipe, settings, smoke)
    request = TrainRequest.parse(stages, start)
    if dry_run:
        from osworld_pipeline.cli.plan import judge_readiness

        readiness = judge_readiness(
            source.load(), state, gpu_memory=gpu_memory, has_plan=True, stages=request.chosen, start=request.start
        )
        if as_json:
            print_json(readiness.as_json())
        else:
            readiness.show(Console())
        if not readiness.is_ok:
            raise typer.Exit(1)
        return
    if gpu_memory is not None:
        raise typer.BadParameter("it is only for planning, with --dry-run", param_hint="--gpu-memory")
    _run("train", source, state, request, as_json=as_json)


def _run(command: str, source: "RecipeResource", state: Path, request: "TrainRequest", *, as_json: bool) -> None:
    from osworld_pipeline.cli.in_process.train import run_train
    from osworld_pipeline.definitions import defs

    # With --json, bars and tables go to standard error.
    console = Console(stderr=as_json)
    ended = run_train(defs, command=command, request=request, source=source, state_root=state, console=console)
    if as_json:
        _print_scores(state, source.load().evaluation.confidence, ended)
    sys.exit(ended.status)


def _print_scores(state: Path, confidence: float, ended: "TrainEnd") -> None:
    """Prints the scores of every evaluation in the state, including this run's, the changes, and the contribution of
    replay."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.evaluation.scores import read_scores

    scores = [
        {**asdict(score), "success_rate": score.success_rate}
        for score in read_scores(StateDir(state.resolve()), confidence=confidence)
    ]
    changes = [change.fields() for change in ended.changes]
    print_json({"state": state, "ok": ended.status == 0, "scores": scores, "changes": changes, "replay": ended.replay})
