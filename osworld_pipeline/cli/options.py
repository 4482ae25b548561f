"""Options that several commands share: which recipe, how it is changed, and where desktops and state are."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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


def names_of(text: str) -> list[str]:
    """Of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
