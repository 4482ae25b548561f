"""`doctor`: what this machine has and lacks for each role, and how to get it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.options import SettingsOption
from osworld_pipeline.cli.pipeline import StateOption

if TYPE_CHECKING:
    from osworld_pipeline.training.memory_fit import Fit


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    role: Annotated[
        str | None,
        typer.Option(help="demo, local, qemu, desktop_env, trainer, dagster, postgres, mlflow, sglang or ray."),
    ] = None,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
    dagster_home: Annotated[
        Path | None, typer.Option(envvar="DAGSTER_HOME", help="Where Dagster's instance is described.")
    ] = None,
    sglang_env: Annotated[Path, typer.Option(envvar="SGLANG_ENV", help="sglang's own environment.")] = Path(
        "var/sglang"
    ),
    desktop_env_python: Annotated[Path, typer.Option(help="The interpreter where desktop-env is installed.")] = Path(
        "var/desktop-env/bin/python"
    ),
    recipe: Annotated[
        str | None, typer.Option(help="With --role trainer: a recipe whose memory is estimated before anything loads.")
    ] = None,
    settings: SettingsOption = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="GB of one GPU to judge the recipe for; without it, of the one here.")
    ] = None,
) -> None:
    """Look at this machine: all roles, or one. Status 0 if that role (the demo, where none is named) can run here, and
    the recipe fits where one is named."""
    from osworld_pipeline.doctor.diagnosis import diagnose, show
    from osworld_pipeline.doctor.place import Place
    from osworld_pipeline.doctor.recipe_fit import show_fit
    from osworld_pipeline.doctor.roles import ROLES, make_checks
    from osworld_pipeline.domain.state import StateDir

    if role is not None and role not in ROLES:
        raise typer.BadParameter(f"no role named '{role}'; there are: {', '.join(ROLES)}", param_hint="--role")
    if recipe is not None and role != "trainer":
        raise typer.BadParameter("a recipe is judged for --role trainer", param_hint="--recipe")
    fit = _fit(recipe, settings, gpu_memory) if recipe is not None else None
    place = Place(
        state=StateDir(state.resolve()),
        dagster_home=dagster_home,
        sglang=sglang_env.absolute(),
        desktop_env_python=desktop_env_python.absolute(),
    )
    diagnosis = diagnose(make_checks(place), role=role or "demo", is_only=role is not None)
    if as_json:
        tell(diagnosis.as_json() | ({} if fit is None else {"fit": fit.as_json()}))
    else:
        show(diagnosis, Console())
        if fit is not None:
            show_fit(fit, Console())
    if not diagnosis.is_ok or (fit is not None and not fit.is_ok):
        raise typer.Exit(1)


def _fit(recipe: str, settings: list[str] | None, gpu_memory: float | None) -> "Fit":
    from osworld_pipeline.doctor.recipe_fit import judge_recipe
    from osworld_pipeline.recipes import load_recipe

    return judge_recipe(load_recipe(recipe, environ=os.environ, settings=settings or []), gpu_gb=gpu_memory)
