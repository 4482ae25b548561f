"""The embedded default: an env server with local desktops, started as a child process while it is needed, or kept
between uses by a program that has several."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.rollout.own_servers import own_server_file
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.placement import RayDesktops
from osworld_pipeline.runs.rollouts.server_process import ServerProcess, env_server_process
from osworld_pipeline.task_schema.version import code_digest

READY_TIMEOUT_S = 120.0
WINE_READY_TIMEOUT_S = 480.0
"""The first start creates drive C:."""
SERVER = tuple(f"env_server{name}" for name in ("", ".providers", ".guest", ".evaluators"))


@dataclass(frozen=True, kw_only=True)
class EnvServers:
    """URLs of env servers, and their token."""

    urls: tuple[str, ...]
    token: str | None = field(repr=False)
    num_replicas: int
    on_ray: RayDesktops | None = None
    """Servers that the job starts on its Ray cluster; then it has no URLs yet."""
    is_embedded: bool = False
    """An embedded server ends with the process that started it."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Settings of an embedded env server."""

    state: StateDir
    num_replicas: int
    screen_width: int
    screen_height: int
    has_wine: bool = False
    """Its desktops run Windows programs."""
    allow_takeover: bool = False
    """A person may send input to its desktops."""


@contextmanager
def embedded_env_server(spec: ServerSpec) -> Iterator[EnvServers]:
    """Runs `env-server --provider local` on a free loopback port until the block ends. Inside `kept_env_server` it runs
    until that block ends and serves later requests for the same spec.

    Raises:
        EnvServerError: the server did not become ready; quotes the last line of its log, which names the cause.
    """
    keeper = _Keeper.current
    if keeper is not None:
        yield keeper.server_for(spec)
        return
    with _running(spec) as (servers, _):
        yield servers


@contextmanager
def kept_env_server() -> Iterator[None]:
    """Keeps one embedded env server of this process running between uses within the block, so its desktops need not
    restart. It is replaced if it has died or if another spec is requested."""
    _Keeper.current = keeper = _Keeper()
    try:
        yield
    finally:
        _Keeper.current = None
        keeper.stop()


class _Keeper:
    current: ClassVar["_Keeper | None"] = None

    def __init__(self) -> None:
        self._spec: ServerSpec | None = None
        self._running: tuple[EnvServers, ServerProcess] | None = None
        self._stack = ExitStack()

    def server_for(self, spec: ServerSpec) -> EnvServers:
        if self._running is None or self._spec != spec or self._running[1].process.poll() is not None:
            self.stop()
            self._spec, self._running = spec, self._stack.enter_context(_running(spec))
        return self._running[0]

    def stop(self) -> None:
        self._running = None
        self._stack.close()


@contextmanager
def _running(spec: ServerSpec) -> Iterator[tuple[EnvServers, ServerProcess]]:
    token = secrets.token_urlsafe(24)
    options = [
        "--provider", "local",
        "--replicas", str(spec.num_replicas),
        "--screen-size", f"{spec.screen_width}x{spec.screen_height}",
        "--host", "127.0.0.1",
        "--state-dir", str(spec.state.desktops),
        *(["--wine"] if spec.has_wine else []),
        *(["--allow-takeover"] if spec.allow_takeover else []),
    ]  # fmt: skip
    with (
        env_server_process(
            options,
            token=token,
            log_path=spec.state.logs / "env-server.log",
            ready_timeout_s=WINE_READY_TIMEOUT_S if spec.has_wine else READY_TIMEOUT_S,
        ) as server,
        own_server_file(spec.state.own_servers, server.url, token),
    ):
        urls = (server.url,)
        yield EnvServers(urls=urls, token=token, num_replicas=spec.num_replicas, is_embedded=True), server


def embedded_identity() -> str:
    """Identifies what the embedded server's desktops and graders are made from, without starting it: the server's
    sources, the code of getters and metrics, and the time when this machine's list of Debian packages last changed."""
    packages = Path("/var/lib/dpkg/status")
    stamp = packages.stat().st_mtime_ns if packages.is_file() else 0
    return f"{code_version(*SERVER)}-{code_digest()[:12]}-{stamp}"
