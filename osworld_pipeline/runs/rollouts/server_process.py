"""An env server as a child process that ends with this one."""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.runs.parent import stop_session

STOP_GRACE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int
    """The place in the log where its own lines start."""
    url: str = ""
    """Empty until it is ready."""

    def how_it_ended(self) -> str:
        """Its exit status and the last line of its log, which names the cause."""
        return f"the env server ended with status {self.process.returncode}: {self.last_line()}"

    def last_line(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self.log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it wrote nothing to {self.log_path}"


@contextmanager
def env_server_process(
    options: Sequence[str],
    *,
    token: str,
    log_path: Path,
    ready_timeout_s: float,
    is_over: threading.Event | None = None,
) -> Iterator[ServerProcess]:
    """Runs `env-server` with these options on a free port until the block ends. `is_over`, set by another thread, ends
    the start.

    Raises:
        EnvServerError: the server did not become ready; quotes the last line of its log, which names the cause.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="env-server-") as scratch, log_path.open("ab") as log:
        ready = Path(scratch) / "ready.json"
        start = log.tell()
        process = subprocess.Popen(
            [
                *python_module("env_server.main"),
                *options,
                *("--port", "0", "--ready-file", str(ready), "--die-with-parent", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**_without_ray(os.environ), "ENV_SERVER_TOKEN": token},  # passed on, not read
        )
        starting = ServerProcess(process=process, log_path=log_path, log_start=start)
        try:
            url = _wait_ready(starting, ready, timeout_s=ready_timeout_s, is_over=is_over or threading.Event())
            yield replace(starting, url=url)
        finally:
            stop_session(process, grace_s=STOP_GRACE_S)


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """An env server in an actor does not need the access to its cluster."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


def _wait_ready(server: ServerProcess, ready: Path, *, timeout_s: float, is_over: threading.Event) -> str:
    """Its URL."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ready.exists():
            return str(json.loads(ready.read_text())["url"])
        if server.process.poll() is not None:
            raise EnvServerError(server.how_it_ended())
        if is_over.wait(0.05):
            raise EnvServerError("the env server was stopped during its start")
    raise EnvServerError(
        f"the env server was not ready after {timeout_s:.0f} s: {server.last_line()} (log: {server.log_path})"
    )
