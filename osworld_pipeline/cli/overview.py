"""What `osworld-pipeline` prints without a command: what this folder holds, and what to do next."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from osworld_pipeline.cli.shown import counted
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import DEFAULT_STATE, STATE_VARIABLE, StateDir
from osworld_pipeline.domain.version import installed_version, version_line
from osworld_pipeline.programs.answers import print_json

PROJECT_FILE = "dagster.yaml"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The state of this folder."""

    folder: Path
    exists: bool
    num_checkpoints: int
    catalog_changed_at: datetime | None
    """None: there is no catalog."""

    def describe(self) -> str:
        if not self.exists:
            return f"{self.folder}: none yet"
        text = f"{self.folder}: {counted(self.num_checkpoints, 'checkpoint')}"
        if self.catalog_changed_at is None:
            return f"{text}, no catalog yet"
        return f"{text}, catalog of {self.catalog_changed_at:%Y-%m-%d %H:%M}"


def show_overview(folder: Path, *, as_json: bool) -> None:
    state = StateDir(folder / (os.environ.get(STATE_VARIABLE) or DEFAULT_STATE))
    is_project = (folder / PROJECT_FILE).is_file()
    found = _look(state)
    lines = list(_next_commands(found, is_project=is_project))
    if as_json:
        print_json(
            {
                "version": installed_version(),
                "folder": folder,
                "is_project": is_project,
                "state": found,
                "next": [{"command": command, "purpose": purpose} for command, purpose in lines],
            }
        )
        return
    print(f"{version_line(PIPELINE)}: trains and evaluates agents that use a computer")
    print(f"  folder  {folder}: {'a project' if is_project else f'no project, because it has no {PROJECT_FILE}'}")
    print(f"  state   {found.describe()}")
    print("next")
    for command, purpose in lines:
        print(f"  {command}\n      {purpose}")


def _look(state: StateDir) -> _Found:
    changed = state.catalog.stat().st_mtime if state.catalog.is_file() else None
    return _Found(
        folder=state.root,
        exists=state.root.is_dir(),
        num_checkpoints=sum(path.is_dir() for path in state.checkpoints.glob("*")),
        catalog_changed_at=None if changed is None else datetime.fromtimestamp(changed).astimezone(),
    )


def _next_commands(state: _Found, *, is_project: bool) -> Iterator[tuple[str, str]]:
    if not is_project:
        yield how_to_set_up("project"), "writes dagster.yaml, workspace.yaml, .env and a recipe into this folder"
    if state.catalog_changed_at is not None:
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
