"""`evaluate`: one checkpoint on tasks and seeds, with a result file."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import (
    CheckpointOption,
    MaxTasksOption,
    RecipeOption,
    SettingsOption,
    SmokeOption,
    StateOption,
    StateRemoteOption,
    TasksOption,
    fresh_state,
    names_of,
    recipe_source,
)
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.cli.shown import ScoreLine, planned_evaluations, say, show_scores
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.domain.checkpoint import Checkpoint
    from osworld_pipeline.evaluation.suite_files import EvalSuite


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


def evaluate(
    checkpoint: CheckpointOption = "",
    suite: Annotated[
        str, typer.Option(help="Name of a suite; default: heldout.", autocompletion=completion.suites)
    ] = "",
    tasks: TasksOption = "",
    max_tasks: MaxTasksOption = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated, e.g. 0,1,2: one episode of each task per seed.")] = "",
    max_turns: Annotated[int | None, typer.Option(min=1, help="Step budget of an episode.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result file (JSON) here.")] = None,
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Evaluate one checkpoint. Every episode is recorded; finished ones are not repeated. Options override the recipe's
    evaluation section."""
    if suite and tasks:
        raise typer.BadParameter("--suite and --tasks both select the tasks: give one of them")
    if output is not None and output.is_dir():
        raise typer.BadParameter(f"--output {output} is a folder: name a file in it")
    if output is not None and not _can_write(output):
        raise typer.BadParameter(f"--output {output} cannot be written: its parent is not a folder, or not writable")
    given_seeds = _seeds(seeds)
    source = recipe_source(
        recipe,
        settings,
        smoke,
        evaluation__seeds=given_seeds,
        evaluation__max_turns=max_turns,
        evaluation__temperature=temperature,
    )
    num_seeds = len(source.load().evaluation.seeds)
    from osworld_pipeline.atomic_io import write_file
    from osworld_pipeline.cli.in_process.evaluate import run_evaluate
    from osworld_pipeline.definitions import defs
    from osworld_pipeline.evaluation.suite_files import HELDOUT
    from osworld_pipeline.object_store.note import is_cache
    from osworld_pipeline.remote.pull import fetch_checkpoints
    from osworld_pipeline.runs.evaluate.plan import TaskChoice

    folder = fresh_state(state, state_remote, must_exist=False, as_json=as_json)
    if is_cache(folder.root):
        if not checkpoint:
            raise typer.BadParameter(f"{state} is a cache of an object store: name a checkpoint with --checkpoint")
        with shown_progress("fetching the checkpoint", as_json=as_json) as on_progress:
            fetch_checkpoints(folder, [checkpoint], on_progress)

    def on_start(chosen: "Checkpoint", on: "EvalSuite") -> None:
        planned = planned_evaluations(
            [chosen.checkpoint_id],
            tasks or f"suite {on.name}",
            recipe=recipe,
            num_tasks=len(on.tasks),
            num_seeds=num_seeds,
        )
        say(f"evaluate: {planned}", as_json=as_json)

    result = run_evaluate(
        defs,
        source=source,
        state_root=state,
        checkpoint=checkpoint,
        choice=TaskChoice(suite=suite or HELDOUT, tasks_file=tasks, max_tasks=max_tasks),
        console=Console(stderr=as_json),
        on_start=on_start,
    )
    if output is not None:
        write_file(output.resolve(), (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    if as_json:
        print_json(result)
        return
    _show(result, Console())
    if output is not None:
        print(f"result file: {output}")


def _can_write(path: Path) -> bool:
    """Whether its folder, or the nearest existing parent, is writable."""
    folder = next(one for one in path.resolve().parents if one.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


def _seeds(text: str) -> list[int] | None:
    try:
        return [int(seed) for seed in names_of(text)] or None
    except ValueError as error:
        raise typer.BadParameter(f"--seeds {text}: must be comma-separated whole numbers, e.g. 0,1,2") from error


def _show(result: dict[str, Any], console: Console) -> None:
    interval = result["interval"] or {}
    line = ScoreLine(
        suite=result["suite"]["name"],
        checkpoint=result["checkpoint"],
        success=result["success_rate"],
        interval=(interval.get("low"), interval.get("high")),
        strict=result["strict_success_rate"],
        num_success=result["num_success"],
        num_valid=result["num_valid"],
        num_faults=result["num_faults"],
    )
    show_scores([line], console)
    for row in result["results"]:
        if row["error"] and row["success"] is None:
            console.print(f"{row['outcome']} {row['task_id']}: {row['error']}", highlight=False, markup=False)
