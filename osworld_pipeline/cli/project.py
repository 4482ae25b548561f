"""`init`, `dev` and `recipes`: the files of a project folder, Dagster on it, and the recipes to begin with."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.machine import JsonOption, ServingJsonOption, announce_successor
from osworld_pipeline.cli.options import StateOption
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import DEFAULT_STATE, STATE_VARIABLE
from osworld_pipeline.domain.top_level_names import shadow_sentence
from osworld_pipeline.programs.addresses import url_at
from osworld_pipeline.programs.answers import print_json


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(dev)
    app.command()(recipes)


def init(
    folder: Annotated[Path, typer.Argument(help="The project folder; created if missing.")] = Path("."),
    recipe: Annotated[
        str, typer.Option(help="The shipped recipe to copy.", autocompletion=completion.recipes)
    ] = "demo",
    postgres: Annotated[bool, typer.Option("--postgres", help="Dagster's instance in Postgres.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Also the manifests of a Kubernetes cluster, in kubernetes/.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a project folder: dagster.yaml, workspace.yaml, .env and a recipe to change. Existing files are kept."""
    from osworld_pipeline.project import kubernetes_files, project_files, write_project

    files = project_files(recipe=recipe, is_postgres=postgres)
    if kubernetes:
        files += kubernetes_files(recipe=recipe)
    root = folder.resolve()
    written = [file.name for file in write_project(root, files, overwrites=overwrite)]
    if as_json:
        print_json({"folder": root, "written": written, "kept": [one.name for one in files if one.name not in written]})
        return
    for file in files:
        print(f"{'wrote' if file.name in written else 'kept '}  {root / file.name}: {file.purpose}")
    if len(written) < len(files):
        say("kept files were there before and may differ: --overwrite replaces them")
    if root != Path.cwd() and (sentence := shadow_sentence(root)):
        say(f"note: {sentence}")
    print(f"next, in {root}:")
    print(f"  {how_to_set_up('debian')}")
    print(f"  {shell_line(PIPELINE, 'demo', '--recipe', 'smoke')}")


def dev(
    state: StateOption = Path(DEFAULT_STATE),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Dagster's pages.")] = 3000,
    host: Annotated[str, typer.Option(help="Address to listen on; Dagster's pages need no login.")] = "127.0.0.1",
    as_json: ServingJsonOption = False,
) -> None:
    """Dagster's pages, schedules and sensors for a state, until Ctrl-C. For the default state it is `dagster dev`."""
    from osworld_pipeline.cli.in_process.instance import instance_home
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.project import WORKSPACE, need_project

    folder = StateDir(state.resolve())
    home, workspace = instance_home(folder), need_project(Path.cwd(), WORKSPACE)
    environment = {**os.environ, "DAGSTER_HOME": str(home)}
    if home != Path.cwd():
        environment[STATE_VARIABLE] = str(folder.root)
        os.chdir(home)  # because the .env of the project folder names the instance of the default state
    command = [sys.executable, "-P", "-m", "dagster", "dev", "-w", str(workspace), "--host", host, "--port", str(port)]
    if as_json:
        announce_successor(url_at(host, port))
    os.execve(sys.executable, command, environment)  # noqa: S606 - Dagster takes this process's place


def recipes(
    name: Annotated[str, typer.Argument(help="Print this recipe's file.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the shipped recipes, or print one."""
    from osworld_pipeline.recipes import recipe_names, recipe_text
    from osworld_pipeline.recipes.describe import head_comment

    if name:
        text = recipe_text(name)
        print_json({"name": name, "text": text}) if as_json else print(text, end="")
        return
    described = {each: head_comment(each) for each in recipe_names()}
    if as_json:
        print_json(described)
        return
    width = max(map(len, described))
    for each, text in described.items():
        print(f"{each:<{width}}  {text.partition('. ')[0].rstrip('.:')}")
