"""Options that several commands share: which recipe, how it is changed, and where desktops and state are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import REMOTE_VARIABLE

if TYPE_CHECKING:
    from osworld_pipeline.domain.state import StateDir
    from resources.state import RecipeResource

RecipeOption = Annotated[str, typer.Option(help="How it is done: a shipped recipe by name, or a .toml file.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value, as agent.max_turns=4; wins over the recipe. May be given often."),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="The recipe at its smallest size.")]
CheckpointOption = Annotated[
    str,
    typer.Option(
        help="An id, a folder, hub:OWNER/NAME[@REVISION] or http(s)://host/v1#model; the champion where none is named, "
        "else the newest."
    ),
]
StateRemoteOption = Annotated[
    str,
    typer.Option(
        "--state-remote",
        envvar=REMOTE_VARIABLE,
        help="s3://BUCKET/PREFIX: the object store of the state. A state folder that is new becomes a cache of it.",
    ),
]
TasksOption = Annotated[str, typer.Option(help="A file of tasks, as a suite has them; instead of --suite.")]
MaxTasksOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")]


def recipe_source(name: str, settings: list[str] | None, smoke: bool, **given: object) -> "RecipeResource":
    """`given`: options that are keys of the recipe by another name, as `evaluation__max_turns=4`; None is not given."""
    from osworld_pipeline.definitions import environment
    from resources.state import RecipeResource

    more = [f"{key.replace('__', '.')}={value}" for key, value in given.items() if value is not None]
    return RecipeResource(name=name, settings=[*(settings or []), *more], smoke=smoke, environment=environment)


def existing_state(path: Path) -> "StateDir":
    """For commands that read a state, or work on what is in it. Raises StoreError where there is no such folder."""
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.errors import StoreError

    state = StateDir(path.resolve())
    if not state.root.is_dir():
        advised = pipeline_line(state, "demo")
        raise StoreError(
            f"there is no state folder {state.root}: run {advised} first, or name another folder with --state"
        )
    return state


def fresh_state(path: Path, state_remote: str, *, must_exist: bool = True, as_json: bool = False) -> "StateDir":
    """As existing_state; a cache of an object store is brought up to date first, or made where the folder is new.
    `must_exist`: False for commands that begin a state.

    Raises:
        StoreError, DependencyError: it cannot be, and there is nothing to read without.
    """
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.object_store import read_note

    state = StateDir(path.resolve())
    if state_remote or read_note(state.root) is not None:
        from osworld_pipeline.remote.status import refresh

        refresh(state, state_remote, lambda sentence: say(sentence, as_json=as_json))
    return existing_state(path) if must_exist else state


def names_of(text: str) -> list[str]:
    """Of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
