"""The state folder and the recipe: the two settings that every asset shares."""

import os
from collections.abc import Mapping
from pathlib import Path

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import DEFAULT_STATE, REMOTE_VARIABLE, STATE_VARIABLE, StateDir
from osworld_pipeline.file_system import need_file_system
from osworld_pipeline.recipes import Recipe, load_recipe
from resources.recipe_overrides import Overrides, settings_of


def configured_state(environment: Mapping[str, str] | None = None) -> str:
    """The state of this code location."""
    return (os.environ if environment is None else environment).get(STATE_VARIABLE) or DEFAULT_STATE


class StateResource(dg.ConfigurableResource):
    """The state folder (`var/`)."""

    path: str = Field(
        default=DEFAULT_STATE,
        description=f"Folder of all state; relative to the project folder. {STATE_VARIABLE} sets it for all runs.",
    )
    remote: str = Field(
        default="",
        description="s3://BUCKET/PREFIX: an object store that the state is pushed to after each stage and compaction. "
        f"{REMOTE_VARIABLE} sets it.",
    )

    def as_config(self) -> dict[str, str]:
        """The configuration for a run that this one requests."""
        return {"path": self.path, **({"remote": self.remote} if self.remote else {})}

    def dir(self) -> StateDir:
        """Raises StoreError if the folder exists and its file system cannot store a state."""
        state = StateDir(Path(self.path).resolve())
        if state.root.is_dir():
            need_file_system(state.root)
        return state


class RecipeResource(dg.ConfigurableResource):
    """The recipe of a run, by name or by path of a TOML file; settings that override it; and Slime-OSWorld's variables,
    which it overrides (docs/recipes.md)."""

    name: str = Field(default="demo", description="Name of a shipped recipe, or the path of a .toml file.")
    overrides: Overrides | None = Field(
        default=None,
        description="Keys of the recipe by section, e.g. {agent: {max_turns: 4}}; they override the recipe's file. The "
        "launchpad completes and checks them.",
    )
    settings: list[str] = Field(
        default_factory=list,
        description="The same as key=value each, as `--set` has it, e.g. agent.max_turns=4; they override `overrides`.",
    )
    smoke: bool = Field(
        default=False, description="Run the recipe at smoke size: a tiny model, at most four updates of a stage."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Slime-OSWorld's variables; the recipe's file overrides them."
    )

    @property
    def options(self) -> list[str]:
        """Command-line options that select this recipe, for suggested commands."""
        path = Path(self.name)
        name = str(path.resolve()) if path.suffix == ".toml" else self.name
        settings = [word for setting in self._settings for word in ("--set", setting)]
        return ["--recipe", name, *settings, *(["--smoke"] if self.smoke else [])]

    @property
    def _settings(self) -> list[str]:
        return [*settings_of(self.overrides), *self.settings]

    def load(self) -> Recipe:
        """Raises RecipeError."""
        return load_recipe(self.name, environ=self.environment, settings=self._settings, is_smoke=self.smoke)
