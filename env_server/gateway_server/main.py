"""`osworld-gateway`: serves sandboxes until it is stopped; then it stops every sandbox."""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from env_server.config import make_settings
from env_server.gateway_server.app import create_gateway
from env_server.gateway_server.faults import Faults, FaultShares
from env_server.gateway_server.readings import readings_of
from env_server.gateway_server.sandboxes import SandboxTable
from env_server.main import bind, make_provider, prepare_process
from env_server.protocols import Provider
from env_server.providers.gateway.settings import TOKEN_VARIABLE, gateway_token
from env_server.serving import connection_limits
from env_server.settings import Settings, SettingsError
from osworld_pipeline.domain.version import version_line
from osworld_pipeline.programs.addresses import ready_message
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.programs.arguments import ArgumentParser, add_server_flags
from osworld_pipeline.programs.failures import run_server_program
from osworld_pipeline.wire.connections import bounded_config
from osworld_pipeline.wire.cross_site import is_loopback
from osworld_pipeline.wire.listening import url_of, write_ready_file
from osworld_pipeline.wire.server_metrics import observed_server

log = logging.getLogger("osworld_gateway")

PROGRAM = "osworld-gateway"
SHUTDOWN_GRACE_S = 3


def main(argv: Sequence[str] | None = None) -> int:
    return run_server_program(PROGRAM, _run, sys.argv[1:] if argv is None else argv)


def _run(words: Sequence[str]) -> int:
    arguments = make_parser().parse_args(words)
    prepare_process(arguments)
    settings = _settings(arguments)
    with bind(settings) as listener:
        asyncio.run(serve_gateway(settings, arguments, listener))
    return 0


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Serves desktops of this machine as remote sandboxes, for env servers with --provider gateway.",
        epilog=f"The token that clients must send comes from the environment: {TOKEN_VARIABLE}.",
    )
    add = parser.add_argument
    add("--version", action="version", version=version_line(PROGRAM))
    add_server_flags(parser)
    add("--provider", choices=("local", "qemu"), default="local", help="kind of desktop (default local)")
    add("--quota", type=_at_least_one, default=4, help="sandboxes at a time; further ones get 429 (default 4)")
    about_lifetime = "end a sandbox that was not used or refreshed for this time (default 300)"
    add("--lifetime-s", type=_seconds, default=300.0, help=about_lifetime)
    add("--retry-after-s", type=_seconds, default=5.0, help="Retry-After for a client over the quota (default 5)")
    add("--host", default="127.0.0.1", help="any address but loopback requires a token")
    add("--port", type=int, default=8200, help="0 selects a free port (default 8200)")
    add("--tls-cert", type=Path, help="PEM; with --tls-key the gateway serves HTTPS")
    add("--tls-key", type=Path)
    add("--screen-size", default="1920x1080", metavar="WIDTHxHEIGHT")
    add("--desktop-memory-mb", type=int, default=1024, help="most memory of a local desktop (default 1024)")
    add("--state-dir", type=Path, default=Path("var/desktops"), help="images (default var/desktops)")
    add("--ready-file", type=Path, help="{url, pid} is written to it when the gateway is ready")
    add(
        "--faults",
        type=_faults,
        default=FaultShares(),
        metavar="LIST",
        help="e.g. fail=0.1,lose=0.05,busy=0.1,slow=0.2:1.5",
    )
    add("--fault-seed", type=int, default=0)
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--die-with-parent", type=int, metavar="PID", help="exit when the parent process, whose id this is, exits")
    return parser


async def serve_gateway(settings: Settings, arguments: argparse.Namespace, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then stops every sandbox."""
    provider = make_provider(settings)
    token = gateway_token()
    sandboxes = SandboxTable(provider, quota=arguments.quota, lifetime_s=arguments.lifetime_s)
    app = create_gateway(
        sandboxes,
        token=token.get_secret_value() if token else None,
        retry_after_s=arguments.retry_after_s,
        faults=Faults(arguments.faults, seed=arguments.fault_seed),
    )
    with observed_server(app, partial(readings_of, sandboxes)) as observed:
        await _serve_until_stopped(observed.app, provider, settings, arguments, listener)


async def _serve_until_stopped(
    app: ASGIApp, provider: Provider, settings: Settings, arguments: argparse.Namespace, listener: socket.socket
) -> None:
    tls: dict[str, Any] = {}
    if arguments.tls_cert is not None:
        tls = {"ssl_certfile": arguments.tls_cert, "ssl_keyfile": arguments.tls_key}
    server = _Server(bounded_config(app, connection_limits(settings), shutdown_grace_s=SHUTDOWN_GRACE_S, **tls))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn only has a flag to poll
            await asyncio.sleep(0.01)
        if not serving.done():
            url = url_of(settings.host, listener, scheme="https" if tls else "http")
            if arguments.ready_file is not None:
                write_ready_file(arguments.ready_file, url)
            if arguments.as_json:
                facts = {"quota": arguments.quota, "provider": provider.name}
                print_json({**ready_message(url), **facts}, on_one_line=True)
            else:
                print(f"{PROGRAM} ready: {url} (quota {arguments.quota}, provider {provider.name})", flush=True)
        await serving
    finally:
        await provider.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Uses our own signal handlers: uvicorn's would raise the signal again before the desktops are stopped."""

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _settings(arguments: argparse.Namespace) -> Settings:
    """
    Raises:
        SettingsError: it would serve a network without a token, only one of the TLS files is given, one does not
            exist, or another setting is invalid.
    """
    if gateway_token() is None and not is_loopback(arguments.host):
        raise SettingsError(
            f"refusing to serve sandboxes on {arguments.host} without a token: set {TOKEN_VARIABLE}, or bind "
            "to 127.0.0.1"
        )
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise SettingsError("HTTPS needs both --tls-cert and --tls-key")
    for path in (arguments.tls_cert, arguments.tls_key):
        if path is not None and not path.is_file():
            raise SettingsError(f"there is no file {path}; check --tls-cert and --tls-key")
    width, _, height = arguments.screen_size.partition("x")
    options = {
        "provider": arguments.provider,
        "screen_width": width,
        "screen_height": height,
        "state_dir": arguments.state_dir,
        "port": arguments.port,
        "local": {"memory_mb": arguments.desktop_memory_mb},
    }
    settings = make_settings(options, environment={})
    return settings.model_copy(update={"host": arguments.host})


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be more than 0 and less than 1000000 seconds, not {text}")
    return value


def _faults(text: str) -> FaultShares:
    try:
        return FaultShares.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
