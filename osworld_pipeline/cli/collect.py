"""`collect`: adds rollouts to the store, for replay and fine-tuning."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import (
    CheckpointOption,
    MaxTasksOption,
    RecipeOption,
    SettingsOption,
    SmokeOption,
    StateOption,
    TasksOption,
    TrainSuiteOption,
    recipe_source,
)
from osworld_pipeline.cli.shown import counted, say
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.cli.in_process.collect import Collected
    from osworld_pipeline.evaluation.suite_files import EvalSuite


def register(app: typer.Typer) -> None:
    app.command()(collect)


def collect(
    checkpoint: CheckpointOption = "",
    oracle: Annotated[bool, typer.Option("--oracle", help="The scripts that solve the recipe's own tasks.")] = False,
    suite: TrainSuiteOption = "",
    tasks: TasksOption = "",
    max_tasks: MaxTasksOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy: all samples of a task are then equal.")] = 1.0,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Step budget of an episode.")] = None,
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Roll out a checkpoint, an endpoint or the oracle. Every episode is stored; finished ones are not repeated."""
    if suite and tasks:
        raise typer.BadParameter("--suite and --tasks both select the tasks: give one of them")
    if oracle and checkpoint:
        raise typer.BadParameter("--oracle and --checkpoint both select the policy: give one of them")
    source = recipe_source(recipe, settings, smoke, agent__max_turns=max_turns)
    from osworld_pipeline.cli.in_process.collect import run_collect
    from osworld_pipeline.definitions import defs
    from osworld_pipeline.runs.collect.plan import ORACLE, TRAIN
    from osworld_pipeline.runs.evaluate.plan import TaskChoice

    def on_start(checkpoint_id: str, on: "EvalSuite") -> None:
        who, what = "the oracle" if oracle else checkpoint_id, tasks or f"suite {on.name}"
        say(
            f"collect: {counted(samples, 'episode')} of each of {counted(len(on.tasks), 'task')} by {who} on {what}, "
            f"with recipe {recipe}; finished ones are not repeated",
            as_json=as_json,
        )

    done = run_collect(
        defs,
        source=source,
        state_root=state,
        checkpoint=ORACLE if oracle else checkpoint,
        choice=TaskChoice(suite=suite or TRAIN, tasks_file=tasks, max_tasks=max_tasks),
        num_samples=samples,
        temperature=temperature,
        console=Console(stderr=as_json),
        on_start=on_start,
    )
    if as_json:
        print_json(done)
    else:
        _show(done)


def _show(done: "Collected") -> None:
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in done.outcomes.items())
    print(
        f"{done.num_episodes} episodes of {done.num_tasks} tasks by {done.checkpoint_id}: {by_outcome}\n"
        f"{done.num_success}/{done.num_valid} graded episodes succeeded, {done.num_solved_tasks} tasks solved at least "
        f"once, {done.num_faults} faults (the same command retries these)\n"
        f"stage_key {done.stage_key}"
    )
    if done.num_heldout_tasks:
        print(
            f"{done.num_heldout_tasks} of these tasks are held out by the recipe: a policy trained on them "
            "cannot be evaluated on them"
        )
