"""The command line options of programs that serve desktops; they override the settings of a configuration file."""

import argparse
import inspect
from functools import partial
from pathlib import Path
from typing import Any

from env_server.config import make_settings, overlay, read_config
from env_server.providers.kinds import provider_kinds
from env_server.server_settings import ServerSettings
from env_server.settings import DEFAULT_DOWNLOAD_HOSTS, TOKEN_VARIABLE, OsgymSettings, TaskLimits
from env_server.table import add_options
from osworld_pipeline.programs.arguments import add_server_flags

EPILOG = f"The bearer token comes from the environment: {TOKEN_VARIABLE}. Other commands: build-image, doctor, osgym."
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The parsed arguments contain only options that are given, so that a default does not hide a file's value."""
    parser.set_defaults(config=None, log_level="info")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with the settings; options override it")
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    add_server_flags(parser)
    add_options(parser, ServerSettings)
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--screen-size", type=_screen_size, metavar="WIDTHxHEIGHT", help="of every desktop (default 1920x1080)")
    add("--download-host", action="append", help="a further host that tasks may download from; repeatable")
    add_options(parser, TaskLimits, "limits")
    for name, kind in provider_kinds().items():
        group = parser.add_argument_group(kind.title or f"provider {name}", inspect.getdoc(kind.settings))
        add_options(group, kind.settings, name)
    add_options(parser.add_argument_group("OSGym", inspect.getdoc(OsgymSettings)), OsgymSettings, "osgym")
    parser.set_defaults(die_with_parent=None)
    parser.add_argument(
        "--die-with-parent", type=int, metavar="PID", help="exit when the parent process, whose id this is, exits"
    )


def settings_of(arguments: argparse.Namespace, **forced: Any) -> ServerSettings:
    """`forced` takes precedence over everything.

    Raises:
        SettingsError: a setting or the file is invalid.
    """
    given = dict(vars(arguments))
    options: dict[str, Any] = {}
    for name, value in given.items():
        table, _, key = name.rpartition(".")
        if table:
            options = overlay(options, {table: {key: value}})
        elif name in ServerSettings.model_fields:
            options[name] = value
    if "screen_size" in given:
        options["screen_width"], options["screen_height"] = given["screen_size"]
    merged = overlay(read_config(arguments.config) if arguments.config is not None else {}, options)
    if "download_host" in given:
        hosts = merged.get("limits", {}).get("download_hosts", DEFAULT_DOWNLOAD_HOSTS)
        merged = overlay(merged, {"limits": {"download_hosts": (*hosts, *given["download_host"])}})
    return make_settings(overlay(merged, forced))


def _screen_size(text: str) -> tuple[int, int]:
    width, separator, height = text.partition("x")
    if not separator or not width.isdigit() or not height.isdigit():
        raise argparse.ArgumentTypeError(f"a screen size must be WIDTHxHEIGHT, such as 1920x1080, not {text!r}")
    return int(width), int(height)
