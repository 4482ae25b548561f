"""Runs a real env-server for a test: its own process, a free port, and a check of what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import processes_below

__all__ = ["RunningServer", "desktops_below", "is_running", "processes_below", "running_env_server"]

READY_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    url: str
    process: subprocess.Popen[bytes]
    state_dir: Path
    temporary: Path
    """Its TMPDIR, empty at first."""
    log: Path


@contextmanager
def running_env_server(
    folder: Path,
    *options: str,
    num_replicas: int = 1,
    token: str | None = None,
    images: Path | None = None,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] = {},
) -> Iterator[RunningServer]:
    """`images` may be shared between servers, so that the base image is built once. `prefix` is a program that replaces
    itself with the server, with `variables` in the environment."""
    state_dir, ready, log = images or folder / "desktops", folder / "ready.json", folder / "env-server.log"
    environment = {key: value for key, value in os.environ.items() if key != "ENV_SERVER_TOKEN"}
    # Short, because a Unix socket's path may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="es-"))
    environment["TMPDIR"] = str(temporary)
    if token is not None:
        environment["ENV_SERVER_TOKEN"] = token
    environment |= variables
    command = [
        *prefix, sys.executable, "-m", "env_server.main", "--provider", "local", "--replicas", str(num_replicas),
        "--port", "0", "--state-dir", str(state_dir), "--ready-file", str(ready),
        "--die-with-parent", str(os.getpid()), *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        reported = json.loads(ready.read_text())
        assert reported["pid"] == process.pid
        yield RunningServer(url=reported["url"], process=process, state_dir=state_dir, temporary=temporary, log=log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def desktops_below(pid: int) -> list[int]:
    """The bubblewrap processes that a server has started, one for each local desktop."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            is_desktop = (Path("/proc") / child / "comm").read_text().strip() == "bwrap"
        except OSError:
            continue
        if is_desktop:
            found.append(int(child))
    return found
