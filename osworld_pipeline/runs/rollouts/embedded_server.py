"""The embedded default: an env server with local desktops, started as a child process while it is needed, or kept
between uses by a program that has several."""

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.task_schema.version import code_digest

READY_TIMEOUT_S = 120.0
WINE_READY_TIMEOUT_S = 480.0
"""The first start creates drive C:."""
STOP_GRACE_S = 15.0
SERVER = tuple(f"env_server{name}" for name in ("", ".providers", ".guest", ".evaluators"))


@dataclass(frozen=True, kw_only=True)
class EnvServers:
    """URLs of env servers, and their token."""

    urls: tuple[str, ...]
    token: str | None = field(repr=False)
    num_replicas: int
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
    """Within the block, one embedded env server of this process stays up between uses, so its desktops need not
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
        self._running: tuple[EnvServers, subprocess.Popen[bytes]] | None = None
        self._stack = ExitStack()

    def server_for(self, spec: ServerSpec) -> EnvServers:
        if self._running is None or self._spec != spec or self._running[1].poll() is not None:
            self.stop()
            self._spec, self._running = spec, self._stack.enter_context(_running(spec))
        return self._running[0]

    def stop(self) -> None:
        self._running = None
        self._stack.close()


@contextmanager
def _running(spec: ServerSpec) -> Iterator[tuple[EnvServers, subprocess.Popen[bytes]]]:
    spec.state.logs.mkdir(parents=True, exist_ok=True)
    log_path = spec.state.logs / "env-server.log"
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="env-server-") as scratch, log_path.open("ab") as log:
        ready = Path(scratch) / "ready.json"
        command = [
            *python_module("env_server.main"),
            "--provider", "local",
            "--replicas", str(spec.num_replicas),
            "--screen-size", f"{spec.screen_width}x{spec.screen_height}",
            "--host", "127.0.0.1",
            "--port", "0",
            "--state-dir", str(spec.state.desktops),
            "--ready-file", str(ready),
            "--die-with-parent", str(os.getpid()),
            *(["--wine"] if spec.has_wine else []),
            *(["--allow-takeover"] if spec.allow_takeover else []),
        ]  # fmt: skip
        start = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "ENV_SERVER_TOKEN": token},  # passed on, not read
        )
        try:
            url = _wait_ready(
                process, ready, log_path, start, timeout_s=WINE_READY_TIMEOUT_S if spec.has_wine else READY_TIMEOUT_S
            )
            yield EnvServers(urls=(url,), token=token, num_replicas=spec.num_replicas, is_embedded=True), process
        finally:
            _stop(process)


def embedded_identity() -> str:
    """Identifies what the embedded server's desktops and graders are made from, without starting it: the server's
    sources, the code of getters and metrics, and the time when this machine's list of Debian packages last changed."""
    packages = Path("/var/lib/dpkg/status")
    stamp = packages.stat().st_mtime_ns if packages.is_file() else 0
    return f"{code_version(*SERVER)}-{code_digest()[:12]}-{stamp}"


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log_path: Path, start: int, *, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ready.exists():
            return str(json.loads(ready.read_text())["url"])
        if process.poll() is not None:
            raise EnvServerError(f"the env server ended with status {process.returncode}: {_tail(log_path, start)}")
        time.sleep(0.05)
    raise EnvServerError(
        f"the env server was not ready after {timeout_s:.0f} s: {_tail(log_path, start)} (log: {log_path})"
    )


def _tail(log_path: Path, start: int) -> str:
    with log_path.open("rb") as log:
        log.seek(start)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"it wrote nothing to {log_path}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets it drain; after the grace period the rest of its session is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
