"""The command line options of programs that serve desktops; they override the settings of a configuration file."""

import argparse
from pathlib import Path
from typing import Any

from env_server.config import make_settings, overlay, read_config
from env_server.providers.kinds import OptionGroup, provider_kinds
from env_server.settings import DEFAULT_DOWNLOAD_HOSTS, OSGYM_VARIABLE, TOKEN_VARIABLE, Settings

EPILOG = f"The bearer token comes from the environment: {TOKEN_VARIABLE}. Other commands: build-image, doctor, osgym."
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Only options that are given are in the parsed arguments, so that a default does not hide a file's value."""
    parser.set_defaults(config=None, log_level="info")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with the settings; options override it")
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    own = OptionGroup(parser)
    own.option("provider", choices=tuple(provider_kinds()), help="kind of desktop (default local)")
    own.option("num_replicas", "--replicas", type=int, help="desktops kept warm (default 1)")
    own.option("host", help="default 127.0.0.1; any address but loopback requires a token")
    own.option("port", type=int, help="0 selects a free port (default 8100)")
    own.option("screen_size", type=_screen_size, metavar="WIDTHxHEIGHT", help="default 1920x1080")
    own.option("grader", choices=("own", "osworld"), help="which metrics score (default own)")
    own.option("state_dir", type=Path, help="images and replicas (default var/desktops)")
    own.option("ready_file", type=Path, help="{url, pid} is written to it when the server is ready")
    own.option("queue_timeout_s", type=float, help="longest wait for a free replica (default 60)")
    own.option("idle_ttl_s", type=float, help="an episode unused for this time is closed (default 900)")
    own.option("drain_timeout_s", type=float, help="longest wait for running calls after SIGTERM (default 30)")
    own.option("max_connections", type=int, help="open connections before 503 (default 2048)")
    own.flag("access_log", "log one line per request, without tokens and bodies")
    own.flag("open_metrics", "/metrics needs no token")
    own.option("download_host", action="append", help="a further host that tasks may download from")
    limits = OptionGroup(parser, "limits")
    limits.option("upload_root", type=Path, help="folder that the verb upload_file may read")
    own.flag("allow_unsandboxed_graders", "without namespaces, run graders with your permissions and network")
    _add_provider_options(parser)
    parser.set_defaults(die_with_parent=None)
    parser.add_argument(
        "--die-with-parent", type=int, metavar="PID", help="exit when the parent process, whose id this is, exits"
    )


def _add_provider_options(parser: argparse.ArgumentParser) -> None:
    for name, kind in provider_kinds().items():
        group = parser.add_argument_group(kind.title or f"provider {name}", kind.about or None)
        kind.add_options(OptionGroup(group, name))
    osgym = OptionGroup(parser.add_argument_group("OSGym's worker ports", "see also: env-server osgym start"), "osgym")
    osgym.option("ports", "--osgym-ports", type=_ports, help="comma-separated; see also " + OSGYM_VARIABLE)
    osgym.option("host", "--osgym-host", help="default 127.0.0.1")
    osgym.option("replicas_per_port", "--osgym-replicas-per-port", type=int, help="default 2")
    osgym.option("pause_s", "--osgym-pause-s", type=float, help="settle time after a step (default 2)")


def settings_of(arguments: argparse.Namespace, **forced: Any) -> Settings:
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
        elif name in Settings.model_fields:
            options[name] = value
    if "screen_size" in given:
        options["screen_width"], options["screen_height"] = given["screen_size"]
    merged = overlay(read_config(arguments.config) if arguments.config is not None else {}, options)
    if "download_host" in given:
        hosts = merged.get("limits", {}).get("download_hosts", DEFAULT_DOWNLOAD_HOSTS)
        merged = overlay(merged, {"limits": {"download_hosts": (*hosts, *given["download_host"])}})
    return make_settings(overlay(merged, forced))


def _ports(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"ports must be numbers, separated by commas, not {text!r}")
    return tuple(map(int, parts))


def _screen_size(text: str) -> tuple[int, int]:
    width, separator, height = text.partition("x")
    if not separator or not width.isdigit() or not height.isdigit():
        raise argparse.ArgumentTypeError(f"a screen size must be WIDTHxHEIGHT, such as 1920x1080, not {text!r}")
    return int(width), int(height)
