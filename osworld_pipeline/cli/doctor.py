"""`doctor`: checks this machine for each role, and shows how to fix problems."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import SettingsOption, StateOption
from osworld_pipeline.programs.answers import print_json

DEFAULT_RECIPE = "demo"
"""The default recipe for the check."""


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
        Path | None, typer.Option(envvar="DAGSTER_HOME", help="The folder with dagster.yaml.")
    ] = None,
    sglang_env: Annotated[Path, typer.Option(envvar="SGLANG_ENV", help="sglang's own environment.")] = Path(
        "var/sglang"
    ),
    desktop_env_python: Annotated[Path, typer.Option(help="The interpreter where desktop-env is installed.")] = Path(
        "var/desktop-env/bin/python"
    ),
    recipe: Annotated[
        str | None,
        typer.Option(help=f"With --role trainer: the recipe to check for; default: {DEFAULT_RECIPE}."),
    ] = None,
    settings: SettingsOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="With --role trainer: also print the plan of the recipe, like train --dry-run."),
    ] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="GB of one GPU to check the recipe for; default: the local GPU.")
    ] = None,
) -> None:
    """Check this machine for all roles, or one. Exit status 0 if that role (default: the demo) can run here. For a
    trainer, the recipe must fit."""
    from osworld_pipeline.cli.plan import judge_readiness
    from osworld_pipeline.doctor.diagnosis import diagnose, show
    from osworld_pipeline.doctor.place import Place
    from osworld_pipeline.doctor.roles import ROLES, checks_of_recipe, make_checks
    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.recipes import load_recipe, recipe_names

    if role is not None and role not in ROLES:
        raise typer.BadParameter(f"no role named '{role}'; there are: {', '.join(ROLES)}", param_hint="--role")
    if role != "trainer":
        given = {"--recipe": recipe, "--set": settings, "--gpu-memory": gpu_memory, "--dry-run": dry_run or None}
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter("a recipe is only checked with --role trainer", param_hint=option)
    loaded = (
        load_recipe(recipe or DEFAULT_RECIPE, environ=os.environ, settings=settings or [])
        if role == "trainer"
        else None
    )
    place = Place(
        state=StateDir(state.resolve()),
        dagster_home=dagster_home,
        sglang=sglang_env.absolute(),
        desktop_env_python=desktop_env_python.absolute(),
    )
    more = checks_of_recipe(loaded) if loaded is not None else ()
    diagnosis = diagnose(make_checks(place), role=role or "demo", is_only=role is not None, more=more)
    if loaded is None:
        if as_json:
            print_json(diagnosis.as_json())
        else:
            show(diagnosis, Console())
            print(f"next: {diagnosis.next_step(place.state, DEFAULT_RECIPE)}")
        is_ready = diagnosis.is_ok
    else:
        default = (
            "" if recipe is not None else f", the default; --recipe selects another of {', '.join(recipe_names())}"
        )
        readiness = judge_readiness(loaded, state, gpu_memory=gpu_memory, has_plan=dry_run)
        is_ready = diagnosis.is_ok and readiness.is_ok
        if as_json:
            print_json({**diagnosis.as_json(), "ok": is_ready, **readiness.as_json()})
        else:
            console = Console()
            console.print(f"readiness for the recipe {loaded.name}{default}", highlight=False, soft_wrap=True)
            show(diagnosis, console)
            readiness.show(console)
            if diagnosis.lacks["trainer"] or readiness.is_ok:
                print(f"next: {diagnosis.next_step(place.state, recipe or DEFAULT_RECIPE)}")
    if not is_ready:
        raise typer.Exit(1)
