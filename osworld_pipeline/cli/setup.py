"""`setup`, `sglang-cpu` and `receive-weights`: what is installed outside our Python environment, and servers on the
machines of policy servers."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption, ServingJsonOption, announce_successor
from osworld_pipeline.cli.shown import say
from osworld_pipeline.domain.remedies import DEBIAN_PARTS, ENVIRONMENTS
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.programs.addresses import ready_message
from osworld_pipeline.programs.answers import print_json

_HELP = "; ".join(f"{name}: {purpose}" for name, purpose in {**DEBIAN_PARTS, **ENVIRONMENTS}.items())


def register(app: typer.Typer) -> None:
    app.command()(setup)
    app.command()(sglang_cpu)
    app.command()(receive_weights)


def setup(
    parts: Annotated[list[str] | None, typer.Argument(help=f"{_HELP}. Default: debian.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command for an administrator; install nothing.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="With sglang or desktop-env: the environment; default: var/sglang, ...")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install what pip cannot: Debian packages (as root or through sudo; their names are printed first), and separate
    Python environments for sglang and desktop-env."""
    from osworld_pipeline.installing import debian_command, install_debian
    from osworld_pipeline.installing.environments import KINDS, make_environment

    chosen = parts or ["debian"]
    unknown = [part for part in chosen if part not in DEBIAN_PARTS and part not in ENVIRONMENTS]
    if unknown:
        known = ", ".join([*DEBIAN_PARTS, *ENVIRONMENTS])
        raise typer.BadParameter(f"no part named '{unknown[0]}'; there are: {known}", param_hint="PARTS")
    kinds = [KINDS[part] for part in chosen if part in KINDS]
    if folder is not None and len(kinds) != 1:
        raise typer.BadParameter("give it with exactly one of sglang and desktop-env", param_hint="--folder")
    packages = [part for part in chosen if part in DEBIAN_PARTS]
    command = debian_command(packages) if packages else ""
    if dry_run and command and not as_json:
        print(command)
    if not dry_run and command:
        install_debian(packages, is_quiet=as_json)
    environments: list[dict[str, object]] = []
    for kind in kinds:
        target = (folder or kind.folder).absolute()
        say(f"{kind.name}: {target} ({kind.size})", as_json=as_json)
        is_made = not dry_run and make_environment(kind, target, is_quiet=as_json or not sys.stderr.isatty())
        environments.append({"name": kind.name, "folder": target, "size": kind.size, "is_made": is_made})
    if as_json:
        print_json({"parts": chosen, "is_dry_run": dry_run, "command": command, "environments": environments})
    elif not dry_run:
        say(f"{', '.join(chosen)}: installed. `{shell_line(PIPELINE, 'doctor')}` checks this machine")


def sglang_cpu(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the sglang server.")] = 30000,
    environment: Annotated[Path, typer.Option("--env", envvar="SGLANG_ENV", help="sglang's own environment.")] = Path(
        "var/sglang"
    ),
    arguments: Annotated[list[str] | None, typer.Argument(help="After `--`: sglang's own arguments.")] = None,
    as_json: ServingJsonOption = False,
) -> None:
    """Serve a checkpoint by sglang on a CPU, until Ctrl-C."""
    from osworld_pipeline.policy_servers.cpu_server import cpu_server

    more = ["--port", str(port), *(arguments or [])]
    server = cpu_server(environment.absolute(), checkpoint, more, os.environ)
    if as_json:
        announce_successor(server.url)
    os.execve(server.arguments[0], server.arguments, {**os.environ, **server.environment})  # noqa: S606 - it becomes sglang


def receive_weights(
    folder: Annotated[Path, typer.Argument(help="Folder for the weights, on a disk that the sglang servers read.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback, ENGINE_TOKEN must have a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: the default of engine.receiver_port; 0: any.")
    ] = None,
    keep: Annotated[int, typer.Option(min=2, help="Number of checkpoints and adapters to keep.")] = 4,
    as_json: ServingJsonOption = False,
) -> None:
    """Take weights over HTTP for the sglang servers of this machine (engine.weights = "upload"), until Ctrl-C."""
    from osworld_pipeline.policy_servers.receiver import serve, token_from
    from osworld_pipeline.recipes.schema import EngineSection

    port = EngineSection().receiver_port if port is None else port

    def on_ready(url: str) -> None:
        if as_json:
            print_json({**ready_message(url), "folder": folder.absolute()}, on_one_line=True)
        else:
            say(f"weights are received at {url} and stored in {folder}  (Ctrl-C stops it)")

    serve(folder, host=host, port=port, keep=keep, token=token_from(), on_ready=on_ready)
