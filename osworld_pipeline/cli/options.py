"""Options that several commands share: which recipe, how it is changed, and where desktops and state are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
        raise StoreError(
            f"there is no state folder {state.root}: run osworld-pipeline demo or train first, or name another folder "
            "with --state"
        )
    return state


def names_of(text: str) -> list[str]:
    """Of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
