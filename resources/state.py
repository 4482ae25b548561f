"""Where the state lies and which recipe runs: the two settings every asset shares."""

from pathlib import Path

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe


class StateResource(dg.ConfigurableResource):
    """The state folder (`var/`)."""

    path: str = Field(default="var", description="Folder of all state; relative to the repository root.")

    def dir(self) -> StateDir:
        return StateDir(Path(self.path).resolve())


class RecipeResource(dg.ConfigurableResource):
    """The recipe of a run, by name or by path of a TOML file."""

    name: str = Field(default="demo", description="Name of a shipped recipe, or the path of a .toml file.")

    def load(self) -> Recipe:
        return load_recipe(self.name)
