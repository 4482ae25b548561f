"""The command line options of programs that serve desktops; they override the settings of a configuration file."""

import argparse
from pathlib import Path
from typing import Any

from env_server.config import make_settings, overlay, read_config
from env_server.settings import DEFAULT_DOWNLOAD_HOSTS, GATEWAY_TOKEN_VARIABLE, OSGYM_VARIABLE, TOKEN_VARIABLE, Settings

EPILOG = f"The bearer token comes from the environment: {TOKEN_VARIABLE}. Other commands: build-image, doctor, osgym."
PROVIDERS = ("local", "qemu", "desktop_env", "gateway")
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Only options that are given are in the parsed arguments, so that a default does not hide a file's value."""
    parser.set_defaults(config=None, log_level="info")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with the settings; options override it")
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    _option(parser, "provider", choices=PROVIDERS, help="kind of desktop (default local)")
    _option(parser, "num_replicas", "--replicas", type=int, help="desktops kept warm (default 1)")
    _option(parser, "host", help="default 127.0.0.1; any address but loopback requires a token")
    _option(parser, "port", type=int, help="0 selects a free port (default 8100)")
    _option(parser, "screen_size", type=_screen_size, metavar="WIDTHxHEIGHT", help="default 1920x1080")
    _option(parser, "grader", choices=("own", "osworld"), help="which metrics score (default own)")
    _option(parser, "state_dir", type=Path, help="images and replicas (default var/desktops)")
    _option(parser, "ready_file", type=Path, help="{url, pid} is written to it when the server is ready")
    _option(parser, "queue_timeout_s", type=float, help="longest wait for a free replica (default 60)")
    _option(parser, "idle_ttl_s", type=float, help="an episode unused for this time is closed (default 900)")
    _option(parser, "drain_timeout_s", type=float, help="longest wait for running calls after SIGTERM (default 30)")
    _option(parser, "max_connections", type=int, help="open connections before 503 (default 2048)")
    _flag(parser, "access_log", "log one line per request, without tokens and bodies")
    _flag(parser, "open_metrics", "/metrics needs no token")
    _option(parser, "download_host", action="append", help="a further host that tasks may download from")
    _option(parser, "limits.upload_root", "--upload-root", type=Path, help="folder that the verb upload_file may read")
    _add_provider_options(parser)
    parser.set_defaults(die_with_parent=None)
    parser.add_argument(
        "--die-with-parent", type=int, metavar="PID", help="exit when the parent process, whose id this is, exits"
    )


def _add_provider_options(parser: argparse.ArgumentParser) -> None:
    local = parser.add_argument_group("provider local")
    _flag(local, "local.allow_unsandboxed", "without namespaces, run desktops as plain processes of this user")
    _flag(local, "local.wine", "desktops have Windows programs (needs the Debian packages wine and wine64)")
    _option(local, "local.memory_mb", "--desktop-memory-mb", type=int, help="most memory of a desktop (default 1024)")
    _option(local, "local.max_processes", "--desktop-processes", type=int, help="most processes of one (default 512)")
    _option(local, "local.max_cpus", "--desktop-cpus", type=float, help="most CPUs of one (default: equal shares)")
    qemu = parser.add_argument_group("provider qemu")
    _option(qemu, "qemu.image", "--image", type=Path, help="a qcow2 image with OSWorld's guest server")
    _option(qemu, "qemu.memory_mb", "--vm-memory-mb", type=int, help="memory of a virtual machine")
    _option(qemu, "qemu.accelerator", "--accelerator", choices=("auto", "kvm", "tcg"), help="auto (default) tests KVM")
    _option(qemu, "qemu.os_type", "--os-type", choices=("linux", "windows"), help="of --image (default linux)")
    _option(qemu, "qemu.login_mark", "--login-mark", type=Path, help="image of a part of Windows' password prompt")
    _flag(qemu, "qemu.open_network", "virtual machines reach the network")
    _flag(qemu, "qemu.uefi", "the image boots by UEFI (needs the Debian package ovmf)")
    gateway = parser.add_argument_group("provider gateway", f"its token comes from {GATEWAY_TOKEN_VARIABLE}")
    _option(gateway, "gateway.url", "--gateway-url", help="https://HOST[:PORT][/PATH] of the gateway")
    _option(gateway, "gateway.client", "--gateway-client", help="a sandbox client's name, or module:attribute (https)")
    _option(gateway, "gateway.quota_wait_s", "--gateway-quota-wait-s", type=float, help="longest wait (default 300)")
    _option(gateway, "gateway.ca_file", "--gateway-ca-file", type=Path, help="certificates to trust, PEM")
    osgym = parser.add_argument_group("OSGym's worker ports", "see also: env-server osgym start")
    _option(osgym, "osgym.ports", "--osgym-ports", type=_ports, help="comma-separated; see also " + OSGYM_VARIABLE)
    _option(osgym, "osgym.host", "--osgym-host", help="default 127.0.0.1")
    _option(osgym, "osgym.replicas_per_port", "--osgym-replicas-per-port", type=int, help="default 2")
    _option(osgym, "osgym.pause_s", "--osgym-pause-s", type=float, help="settle time after a step (default 2)")
    theirs = parser.add_argument_group("provider desktop_env, grader osworld")
    _flag(theirs, "allow_unsandboxed_graders", "without namespaces, run graders with your permissions and network")
    _option(theirs, "desktop_env.python", "--desktop-env-python", type=Path, help="interpreter where it is installed")
    _option(theirs, "desktop_env.provider_name", "--desktop-env-provider", help="DesktopEnv's provider (docker)")
    _option(theirs, "desktop_env.path_to_vm", "--desktop-env-vm", help="DesktopEnv's path_to_vm")
    _option(theirs, "desktop_env.plugin", "--desktop-env-plugin", metavar="MODULE:FUNCTION", help="your own provider")


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


def _option(parser: Any, field: str, flag: str | None = None, **options: Any) -> None:
    options.setdefault("metavar", None if "choices" in options else field.rpartition(".")[2].upper())
    flag = flag or f"--{field.replace('_', '-')}"
    parser.add_argument(flag, dest=field, default=argparse.SUPPRESS, **options)


def _flag(parser: Any, field: str, text: str) -> None:
    flag = f"--{field.rpartition('.')[2].replace('_', '-')}"
    parser.add_argument(flag, dest=field, action="store_true", default=argparse.SUPPRESS, help=text)


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
