"""The files of a project folder: `osworld-pipeline init` writes them, commands and `dagster dev` are run there. A
checkout has its own `dagster.yaml`, `workspace.yaml` and `.env`, so it can be used like a project folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.errors import DependencyError, StoreError
from osworld_pipeline.recipes import load_recipe, recipe_text

INSTANCE = "dagster.yaml"
WORKSPACE = "workspace.yaml"
VARIABLES = ".env"
RECIPE = "recipe.toml"
COMPOSE = "compose.yaml"
DEPLOYMENT = "deployment.yaml"
KUBERNETES = "kubernetes"
LOCAL_INSTANCE, POSTGRES_INSTANCE = INSTANCE, "dagster.postgres.yaml"
_HEAD = "# Your recipe: a copy of `{name}`, to change. Commands use it with `--recipe {file}`.\n#\n"


@dataclass(frozen=True, kw_only=True)
class ProjectFile:
    name: str
    purpose: str
    text: str


def project_files(*, recipe: str = "demo", is_postgres: bool = False) -> list[ProjectFile]:
    """Raises RecipeError: there is no such recipe."""
    instance = POSTGRES_INSTANCE if is_postgres else LOCAL_INSTANCE
    storage = "in Postgres" if is_postgres else "in var/dagster"
    return [
        ProjectFile(name=INSTANCE, purpose=f"Dagster's instance, {storage}", text=template(instance)),
        ProjectFile(name=WORKSPACE, purpose="Dagster's code location", text=template(WORKSPACE)),
        ProjectFile(name=VARIABLES, purpose="variables for `dagster dev`, with examples", text=template("env")),
        ProjectFile(
            name=RECIPE,
            purpose=f"a copy of the recipe {recipe}, to change",
            text=_recipe_copy(recipe),
        ),
        ProjectFile(
            name=DEPLOYMENT,
            purpose="default resources of Dagster runs, as comments to complete",
            text=template(DEPLOYMENT),
        ),
        ProjectFile(
            name=COMPOSE,
            purpose="the project in containers, on one host",
            text=_of_this_version(template(COMPOSE)),
        ),
    ]


def kubernetes_files(*, recipe: str = "demo") -> list[ProjectFile]:
    """Manifests for `kubectl apply -k kubernetes`, with desktops of the recipe's screen.

    Raises:
        RecipeError: there is no such recipe.
    """
    desktop = load_recipe(recipe).desktop
    instance = "config/instance.yaml"
    texts = dict(_texts_below(resources.files(__name__) / KUBERNETES))
    texts[instance] = template(POSTGRES_INSTANCE) + texts.pop("config/run_launcher.yaml")
    texts["config/recipe.toml"] = _recipe_copy(recipe)
    return [
        ProjectFile(
            name=f"{KUBERNETES}/{name}",
            purpose=f"for `kubectl apply -k {KUBERNETES}`",
            text=_of_this_version(text).replace("@screen@", f"{desktop.screen_width}x{desktop.screen_height}"),
        )
        for name, text in sorted(texts.items())
    ]


def _recipe_copy(recipe: str) -> str:
    return _HEAD.format(name=recipe, file=RECIPE) + recipe_text(recipe)


def _of_this_version(text: str) -> str:
    return text.replace("@version@", installed_version() or "latest")


def _texts_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _texts_below(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_text(encoding="utf-8")


def template(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def write_project(folder: Path, files: Sequence[ProjectFile], *, overwrites: bool = False) -> list[ProjectFile]:
    """Writes the files that `folder` lacks, or all with `overwrites`; returns those that were written.

    Raises:
        StoreError: the folder cannot be written.
    """
    written = []
    for file in files:
        path = folder / file.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if overwrites else "x", encoding="utf-8") as out:
                out.write(file.text)
        except FileExistsError as error:
            if not path.exists():
                raise StoreError(f"{folder} is not a folder: give another") from error
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        else:
            written.append(file)
    return written


def need_project(folder: Path, name: str = INSTANCE) -> Path:
    """This file of a project folder. Raises DependencyError if there is none."""
    path = folder / name
    if not path.is_file():
        raise DependencyError(
            f"there is no {name} in {folder}: make this folder a project with `{how_to_set_up('project')}`, or change "
            "to your project folder"
        )
    return path
