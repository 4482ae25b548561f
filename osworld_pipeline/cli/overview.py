"""What `osworld-pipeline` prints without a command: what this folder holds, and what to do next."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import DEFAULT_STATE, STATE_VARIABLE, StateDir
from osworld_pipeline.domain.version import version_line

PROJECT_FILE = "dagster.yaml"


def show_overview(folder: Path) -> None:
    state = StateDir(folder / (os.environ.get(STATE_VARIABLE) or DEFAULT_STATE))
    is_project = (folder / PROJECT_FILE).is_file()
    print(f"{version_line(PIPELINE)}: trains and evaluates agents that use a computer")
    print(f"  folder  {folder}: {'a project' if is_project else f'no project, because it has no {PROJECT_FILE}'}")
    print(f"  state   {_describe(state)}")
    print("next")
    lines = list(_next_commands(state, is_project=is_project))
    for command, purpose in lines:
        print(f"  {command}\n      {purpose}")


def _describe(state: StateDir) -> str:
    if not state.root.is_dir():
        return f"{state.root}: none yet"
    checkpoints = sum(path.is_dir() for path in state.checkpoints.glob("*"))
    text = f"{state.root}: {checkpoints} {'checkpoint' if checkpoints == 1 else 'checkpoints'}"
    if not state.catalog.is_file():
        return f"{text}, no catalog yet"
    changed = datetime.fromtimestamp(state.catalog.stat().st_mtime)
    return f"{text}, catalog of {changed:%Y-%m-%d %H:%M}"


def _next_commands(state: StateDir, *, is_project: bool) -> Iterator[tuple[str, str]]:
    if not is_project:
        yield how_to_set_up("project"), "writes dagster.yaml, workspace.yaml, .env and a recipe into this folder"
    if state.catalog.is_file():
        yield shell_line(PIPELINE, "view"), "shows every episode step by step in a browser"
        yield shell_line(PIPELINE, "report"), "writes scores and curves as a page"
        yield shell_line(PIPELINE, "cookbook"), "lists questions that the store answers"
    else:
        yield how_to_set_up("debian"), "names and installs the Debian packages of a desktop"
        yield (
            shell_line(PIPELINE, "demo", "--recipe", "smoke"),
            "runs all stages in minutes, without learning",
        )
    yield (
        shell_line(PIPELINE, "demo"),
        "trains and evaluates a tiny model in ten minutes, or continues",
    )
    if is_project:
        yield shell_line(PIPELINE, "dev"), "opens Dagster: assets, runs, schedules"
    yield shell_line(PIPELINE, "doctor"), "says what this machine lacks"
    yield shell_line(PIPELINE, "--help"), "lists all commands"
