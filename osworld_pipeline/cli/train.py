"""`train` and `demo`: train the stages of a recipe on this machine, then evaluate what they made."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.options import SettingsOption, SmokeOption, recipe_source
from osworld_pipeline.cli.pipeline import StateOption
from osworld_pipeline.cli.shown import counted

if TYPE_CHECKING:
    from jobs.train import TrainEnd, TrainRequest
    from osworld_pipeline.recipes import Recipe
    from osworld_pipeline.runs.training_plan import TrainingPlan
    from resources.state import RecipeResource

GB = 1e9


def register(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(train)


def demo(
    recipe: Annotated[str, typer.Option(help="A shipped recipe by name, or a .toml file.")] = "demo",
    settings: SettingsOption = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The recipe's road at the smallest size.")] = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Materialize every asset on this machine, then print success rates on held-out tasks."""
    from jobs.train import TrainRequest

    _run("demo", recipe_source(recipe, settings, smoke), state, TrainRequest(), as_json=as_json)


def train(
    recipe: Annotated[str, typer.Option(help="A shipped recipe by name, or a .toml file.")],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Train this checkpoint: an id, champion, a folder, or hub:OWNER/NAME[@REVISION]; without --stages by "
            "the flywheel and the GSPO phases.",
        ),
    ] = "",
    stages: Annotated[
        str,
        typer.Option(help="With commas, of base, sft, flywheel, gspo_phase1, gspo_phase2; all where none is named."),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it will take, and start nothing. Status 1 if it cannot fit.")
    ] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="With --dry-run: GB of one GPU to plan for; without it, of those here.")
    ] = None,
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Train a recipe's stages on this machine and evaluate every checkpoint; what is finished is not run again."""
    from jobs.train import TrainRequest

    source = recipe_source(recipe, settings, smoke)
    request = TrainRequest.parse(stages, start)
    if dry_run:
        _show_plan(source.load(), request, state, gpu_memory, as_json=as_json)
        return
    if gpu_memory is not None:
        raise typer.BadParameter("it is planned with, and goes with --dry-run", param_hint="--gpu-memory")
    _run("train", source, state, request, as_json=as_json)


def _run(command: str, source: "RecipeResource", state: Path, request: "TrainRequest", *, as_json: bool) -> None:
    from jobs.train import run_train
    from osworld_pipeline.definitions import defs

    # Bars and tables are for people: with --json they go to standard error.
    console = Console(stderr=as_json)
    ended = run_train(defs, command=command, request=request, source=source, state_root=state, console=console)
    if as_json:
        _tell(state, source.load().evaluation.confidence, ended)
    sys.exit(ended.status)


def _tell(state: Path, confidence: float, ended: "TrainEnd") -> None:
    """Scores of every evaluation in the state, this run's among them; what changed, and what replay contributed."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.evaluation.scores import read_scores

    scores = [
        {**asdict(score), "success_rate": score.success_rate}
        for score in read_scores(StateDir(state.resolve()), confidence=confidence)
    ]
    changes = [change.fields() for change in ended.changes]
    tell({"state": state, "ok": ended.status == 0, "scores": scores, "changes": changes, "replay": ended.replay})


def _show_plan(
    recipe: "Recipe", request: "TrainRequest", state: Path, gpu_memory: float | None, *, as_json: bool
) -> None:
    from osworld_pipeline.doctor.recipe_fit import judge_recipe, show_fit
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.runs.training_plan import plan_training
    from osworld_pipeline.training.model_shapes import shape_of

    plan = plan_training(recipe, request.chosen, StateDir(state.resolve()))
    fit = None if shape_of(recipe.model) is None else judge_recipe(recipe, gpu_gb=gpu_memory)
    if as_json:
        tell(
            {
                "recipe": recipe.name,
                "from": request.start or None,
                "plan": plan.as_json(),
                "fit": None if fit is None else fit.as_json(),
            }
        )
    else:
        console = Console()
        _print_plan(recipe, request, plan, console)
        if fit is None:
            console.print("Memory: the size of the recipe's model is unknown; set model.path to its folder.")
        else:
            show_fit(fit, console)
    if fit is not None and not fit.is_ok:
        raise typer.Exit(1)


def _print_plan(recipe: "Recipe", request: "TrainRequest", plan: "TrainingPlan", console: Console) -> None:
    table = Table(title=f"recipe {recipe.name}", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "updates", "episodes", "how"):
        table.add_column(name, justify="right" if name in ("updates", "episodes") else "left")
    for stage in plan.stages:
        table.add_row(str(stage.stage), f"{stage.num_updates:,}", f"{stage.num_episodes:,}", stage.how)
    console.print(table)
    ranks = "1 process" if plan.num_processes == 1 else f"{plan.num_processes} processes"
    lines = [
        f"starts from: {request.start or 'the base model of the recipe'}",
        f"trainer: {ranks}, one GPU each where there are GPUs; engine: {plan.engine}",
        f"desktops: {plan.desktops}; {counted(plan.num_slots, 'episode')} at once",
        _disk_line(plan),
        _time_line(plan),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _disk_line(plan: "TrainingPlan") -> str:
    if plan.checkpoint_bytes is None:
        return "disk: unknown, for the size of the model is"
    each, total = plan.checkpoint_bytes / GB, plan.checkpoint_bytes * plan.num_checkpoints / GB
    return f"disk (estimate): {plan.num_checkpoints} checkpoints x {each:.2f} GB = {total:.1f} GB, and screenshots"


def _time_line(plan: "TrainingPlan") -> str:
    if plan.episode_s is None or plan.rollout_s is None:
        return "rollouts: no estimate of their time, for this state has too few training episodes to measure"
    return (
        f"rollouts (estimate): {plan.num_episodes:,} episodes x {plan.episode_s:.1f} s (median of this state) / "
        f"{plan.num_slots} at once = {plan.rollout_s / 60:.0f} minutes, without the updates"
    )
