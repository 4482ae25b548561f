"""Options that several commands share: the recipe, its settings, the desktops and the state."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli import completion
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import REMOTE_VARIABLE, STATE_VARIABLE

if TYPE_CHECKING:
    from osworld_pipeline.domain.state import StateDir
    from resources.state import RecipeResource

RecipeOption = Annotated[
    str, typer.Option(help="The recipe: a shipped one by name, or a .toml file.", autocompletion=completion.recipes)
]
CheckpointsOption = Annotated[
    str, typer.Option(help="Ids, comma-separated; default: all.", autocompletion=completion.checkpoints)
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value, e.g. agent.max_turns=4; overrides the recipe. Repeatable."),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="The recipe at its smallest size.")]
CheckpointOption = Annotated[
    str,
    typer.Option(
        help="An id, a folder, hub:OWNER/NAME[@REVISION] or http(s)://host/v1#model; default: the champion, "
        "else the newest.",
        autocompletion=completion.checkpoints,
    ),
]
TrainSuiteOption = Annotated[
    str, typer.Option(help="Name of a suite; default: train (the recipe's).", autocompletion=completion.suites)
]
StateOption = Annotated[Path, typer.Option(envvar=STATE_VARIABLE, help="The state folder.")]
StateRemoteOption = Annotated[
    str,
    typer.Option(
        "--state-remote",
        envvar=REMOTE_VARIABLE,
        help="s3://BUCKET/PREFIX: the object store of the state. A new state folder becomes a cache of it.",
    ),
]
TasksOption = Annotated[str, typer.Option(help="A file of tasks in the format of a suite; instead of --suite.")]
MaxTasksOption = Annotated[int | None, typer.Option(min=1, help="Use only this many of the first tasks.")]


def recipe_source(name: str, settings: list[str] | None, smoke: bool, **given: object) -> "RecipeResource":
    """`given`: options that set keys of the recipe, e.g. `evaluation__max_turns=4`; None means not given."""
    from osworld_pipeline.recipes.environment import own_variables
    from resources.state import RecipeResource

    more = [f"{key.replace('__', '.')}={value}" for key, value in given.items() if value is not None]
    return RecipeResource(
        name=name, settings=[*(settings or []), *more], smoke=smoke, environment=own_variables(os.environ)
    )


def existing_state(path: Path) -> "StateDir":
    """The state of a command that reads an existing one. Raises StoreError if there is no such folder."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.errors import StoreError

    state = StateDir(path.resolve())
    if not state.root.is_dir():
        advised = pipeline_line(state, "demo")
        raise StoreError(
            f"there is no state folder {state.root}: run {advised} first, or name another folder with --state"
        )
    return state


def writable_state(path: Path, *, must_exist: bool = True) -> "StateDir":
    """The state of a command that writes to it. `must_exist`: False if the command may create the folder. Raises
    StoreError if there is no such folder and it must exist, or if its file system cannot store a state."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.file_system import need_file_system

    state = existing_state(path) if must_exist else StateDir(path.resolve())
    if state.root.is_dir():
        need_file_system(state.root)
    return state


def fresh_state(path: Path, state_remote: str, *, must_exist: bool = True, as_json: bool = False) -> "StateDir":
    """Does the same as existing_state, but a cache of an object store is first updated, or created if the folder is
    new. `must_exist`: False for commands that write a state, and may create it.

    Raises:
        StoreError: there is no state folder, or it cannot be written.
        StoreError, DependencyError: the object store is needed and cannot be read.
    """
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.object_store import read_note

    state = StateDir(path.resolve())
    if state_remote or read_note(state.root) is not None:
        from osworld_pipeline.remote.status import refresh

        with shown_progress("remote pull", as_json=as_json) as on_progress:
            refresh(state, state_remote, lambda sentence: say(sentence, as_json=as_json), on_progress)
    return existing_state(path) if must_exist else writable_state(path, must_exist=False)


def names_of(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]
