"""`doctor`: what this machine has and lacks for each role, and how to get it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.pipeline import StateOption


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
) -> None:
    """Look at this machine: all roles, or one. Status 0 if that role (the demo, where none is named) can run here."""
    from osworld_pipeline.doctor.diagnosis import diagnose, show
    from osworld_pipeline.doctor.place import Place
    from osworld_pipeline.doctor.roles import ROLES, make_checks
    from osworld_pipeline.domain.state import StateDir

    if role is not None and role not in ROLES:
        raise typer.BadParameter(f"no role named '{role}'; there are: {', '.join(ROLES)}", param_hint="--role")
    place = Place(
        state=StateDir(state.resolve()),
        dagster_home=dagster_home,
        sglang=sglang_env.absolute(),
        desktop_env_python=desktop_env_python.absolute(),
    )
    diagnosis = diagnose(make_checks(place), role=role or "demo", is_only=role is not None)
    if as_json:
        tell(diagnosis.as_json())
    else:
        show(diagnosis, Console())
    if not diagnosis.is_ok:
        raise typer.Exit(1)
