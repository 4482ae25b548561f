"""`demonstrate`: a person solves a task, and the demonstration becomes a source of replay rows."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import (
    RecipeOption,
    SettingsOption,
    SmokeOption,
    StateOption,
    TrainSuiteOption,
    recipe_source,
    writable_state,
)
from osworld_pipeline.cli.shown import counted, say
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.domain.task import Task
    from osworld_pipeline.recipes import Recipe
    from osworld_pipeline.runs.sources.person_demonstration import Played


def register(app: typer.Typer) -> None:
    app.command()(demonstrate)


def demonstrate(
    task: Annotated[str, typer.Option(help="The task's id.")],
    suite: TrainSuiteOption = "train",
    server: Annotated[
        str,
        typer.Option(
            help="URL of an env server that was started with --allow-takeover; its token is taken from "
            "ENV_SERVER_TOKEN. Default: the recipe's, else one is started here."
        ),
    ] = "",
    who: Annotated[str, typer.Option(help="Name of the person, kept with the demonstration.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of the demonstration; stored in every row.")] = "unknown",
    name: Annotated[
        str,
        typer.Option(
            help="Import to add the demonstration to, and source of its rows: lower-case letters, digits and _."
        ),
    ] = "person",
    limit_minutes: Annotated[float, typer.Option(min=0.1, help="Time for the whole demonstration.")] = 30.0,
    recipe: RecipeOption = "demo",
    settings: SettingsOption = None,
    smoke: SmokeOption = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Solve a task yourself in a browser. Each input is a step; a success is added to the demonstrations."""
    from osworld_pipeline.datasets.importers import ImportOptions
    from osworld_pipeline.datasets.importers.folder import check_options
    from osworld_pipeline.datasets.importers.person import add_demonstration, check_person_import

    loaded = recipe_source(recipe, settings, smoke).load()
    place = writable_state(state, must_exist=False)
    options = ImportOptions(name=name, licence=licence)
    check_options(options)
    check_person_import(place, options)
    chosen = _find_task(place, loaded, suite, task, as_json=as_json)
    played = _play(chosen, loaded, place, server, limit_s=60 * limit_minutes, as_json=as_json)
    demonstration = played.demonstration
    is_kept = demonstration.reward >= loaded.reward.success_threshold
    summary = None
    if is_kept:
        summary = add_demonstration(place, chosen, demonstration, options, provenance=played.provenance(who))
    if as_json:
        import_ = None if summary is None else {"folder": place.imports / name, **asdict(summary)}
        steps = {"reward": demonstration.reward, "num_steps": demonstration.num_steps}
        print_json({**played.provenance(who), "task_id": task, **steps, "is_kept": is_kept, "import": import_})
    else:
        _show(played, place.imports / name, summary is not None)
    if not is_kept:
        raise typer.Exit(1)


def _find_task(state: "StateDir", recipe: "Recipe", suite: str, task_id: str, *, as_json: bool) -> "Task":
    from osworld_pipeline.domain.near_names import did_you_mean
    from osworld_pipeline.errors import DatasetError
    from osworld_pipeline.runs.collect.plan import holds_back, load_collected
    from osworld_pipeline.runs.evaluate.plan import TaskChoice

    found = load_collected(state, recipe, TaskChoice(suite=suite))
    task = next((one for one in found.tasks if task_id in (one.task_id, found.name_of(one))), None)
    if task is None:
        names = [found.name_of(one) for one in found.tasks]
        raise DatasetError(f"suite {suite} has no task '{task_id}'{did_you_mean(task_id, names)}")
    if holds_back(recipe, replace(found, tasks=(task,))):
        say("this task is held out by the recipe: a policy trained on it cannot be evaluated on it", as_json=as_json)
    return task


def _play(task: "Task", recipe: "Recipe", state: "StateDir", server: str, *, limit_s: float, as_json: bool) -> "Played":
    import asyncio

    import dagster as dg

    from osworld_pipeline.runs.sources.person_demonstration import desktops_for_a_person, play_by_person

    urls = (server,) if server else recipe.desktop.server_urls
    token = dg.EnvVar("ENV_SERVER_TOKEN").get_value()
    with desktops_for_a_person(state, recipe, urls, token) as servers:

        def show_page(url: str) -> None:
            # Also with --json: the person needs the address. It goes to standard error.
            say(f"task {task.task_id}: {task.instruction}")
            say(f"solve it on this page, then press Done or Give up: {url}")
            if servers.is_embedded:
                say(f"the page asks for this token: {servers.token}")

        playing = play_by_person(
            task,
            recipe=recipe,
            state=state,
            servers=servers,
            limit_s=limit_s,
            on_page=show_page,
            on_step=lambda sentence: say(sentence, as_json=as_json),
        )
        return asyncio.run(playing)


def _show(played: "Played", folder: Path, is_kept: bool) -> None:
    item = played.demonstration
    steps = counted(item.num_steps, "step")
    if not is_kept:
        print(f"reward {item.reward:g} after {steps}: not solved, so the demonstration is not kept")
        return
    print(
        f"reward {item.reward:g} after {steps}: added to {folder}\n"
        "the next build of the union tables makes a replay row of it, and verified_replay plays it again"
    )
