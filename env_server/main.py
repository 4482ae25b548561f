"""`env-server`: starts warm desktops and serves them until it is stopped; then it removes everything it created.

`env-server COMMAND ...` runs a command of the table below; without one it serves."""

import argparse
import importlib
import logging
import resource
import signal
import sys
from collections.abc import Callable, Sequence

from env_server.driving.download import Downloader
from env_server.driving.driver import Drivers
from env_server.driving.guest_driver import Graders, GuestDrivers
from env_server.options import EPILOG, add_server_options, settings_of
from env_server.osgym_ports import osgym_listeners
from env_server.protocols import Provider
from env_server.providers.desktop_env.kind import DesktopEnvSettings
from env_server.providers.kinds import provider_kinds
from env_server.serving import bind, run_server, serve
from env_server.settings import Settings, SettingsError
from osworld_pipeline.domain.parent import dies_with_parent
from osworld_pipeline.domain.shown_commands import ENV_SERVER
from osworld_pipeline.domain.version import version_line
from osworld_pipeline.programs.arguments import ArgumentParser
from osworld_pipeline.programs.failures import run_server_program
from osworld_pipeline.wire.tracing import start_tracing

__all__ = ["bind", "main", "make_drivers", "make_provider", "prepare_process", "serve"]

log = logging.getLogger("env_server")

COMMANDS = {
    "build-image": "env_server.providers.qemu.build:main",
    "doctor": "env_server.doctor:main",
    "osgym": "env_server.osgym_workers:main",
}
"""Each is called with the arguments after its name and returns the exit status; imported only when it is called."""
MAX_OPEN_FILES = 65_536


def main(argv: Sequence[str] | None = None) -> int:
    return run_server_program(ENV_SERVER, _run, sys.argv[1:] if argv is None else argv)


def _run(words: Sequence[str]) -> int:
    if words and words[0] in COMMANDS:
        return _command(COMMANDS[words[0]])(words[1:])
    arguments = _parse(words)
    prepare_process(arguments)
    start_tracing("osworld-env-server")
    settings = settings_of(arguments)
    with bind(settings) as listener, osgym_listeners(settings) as extra_listeners:
        run_server(
            settings,
            make_provider(settings),
            make_drivers(settings),
            listener,
            extra_listeners,
            as_json=arguments.as_json,
        )
    return 0


def prepare_process(arguments: argparse.Namespace) -> None:
    """Logging, the limit of open files, and exit with the parent process, for every command that serves."""
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _raise_file_limit()
    if arguments.die_with_parent is not None:
        _die_with_parent(arguments.die_with_parent)


def make_provider(settings: Settings) -> Provider:
    """
    Raises:
        SettingsError, DependencyError: this provider does not work with these settings, or not on this machine.
    """
    try:
        return provider_kinds()[settings.provider].make(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def make_drivers(settings: Settings) -> Drivers:
    """The drivers that run episodes on that provider's desktops."""
    kind = provider_kinds()[settings.provider]
    if kind.make_drivers is not None:
        return kind.make_drivers(settings)
    downloader = Downloader(settings.limits, folder=settings.state_dir / "downloads")
    graders = _make_graders(settings, downloader)
    return GuestDrivers(limits=settings.limits, downloader=downloader, screen=settings.screen, graders=graders)


def _make_graders(settings: Settings, downloader: Downloader) -> Graders | None:
    if settings.grader == "own":
        return None
    from env_server.providers.desktop_env.graders import OSWorldGraders

    return OSWorldGraders(
        python=settings.of(DesktopEnvSettings).python,
        folder=settings.state_dir / "desktop-env",
        with_ports=provider_kinds()[settings.provider].has_ports,
        downloader=downloader,
        allow_unsandboxed=settings.allow_unsandboxed_graders,
    )


def _command(target: str) -> Callable[[Sequence[str]], int]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _raise_file_limit() -> None:
    """Hundreds of desktops and their clients need more open files than the default soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _die_with_parent(parent_pid: int) -> None:
    """Sends this process SIGTERM when its parent ends, so that a killed run leaves no desktops."""
    try:
        has_parent = dies_with_parent(signal.SIGTERM, parent_pid=parent_pid)
    except OSError as error:
        raise SettingsError(f"the kernel refused --die-with-parent ({error})") from error
    if not has_parent:
        raise SettingsError(f"the parent, process {parent_pid}, ended before this program started")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=ENV_SERVER, description="Serves desktops for OSWorld tasks over HTTP.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=version_line(ENV_SERVER))
    add_server_options(parser)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
