"""A real sglang server on a CPU, where one is installed (osworld-pipeline setup sglang)."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from osworld_pipeline.policy_servers.cpu_server import cpu_server

START_TIMEOUT_S = 600.0
"""45 s where nothing else runs."""


@dataclass(frozen=True, kw_only=True)
class SglangProcess:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def num_loads(self) -> int:
        """The number of weight loads since the server started."""
        return self.log.read_text(errors="replace").count("Update engine weights online from disk begin")

    def kill(self) -> None:
        """Kills the server at once, with everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def running_sglang(checkpoint: Path, *, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server that is up; `env` adds to its settings. Skips where there is no sglang."""
    with sglang_process(checkpoint, env=env) as server:
        yield server.url


@contextmanager
def sglang_process(
    checkpoint: Path, *arguments: str, env: Mapping[str, str] | None = None, port: int | None = None
) -> Iterator[SglangProcess]:
    """As `running_sglang`, but gives the process; `arguments` are sglang's own."""
    named = os.environ.get("OSWORLD_SGLANG")
    if not named:
        pytest.skip("takes minutes and an environment of its own: make test-sglang")
    folder = Path(named).resolve()
    if not (folder / "bin" / "python").exists():
        pytest.skip(f"no sglang at {folder}: osworld-pipeline setup sglang makes it")
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    # The signal reaches the server when these tests are killed, and the server's own processes follow it.
    more = ["--port", str(port), "--log-level", "info", *arguments]
    server = cpu_server(folder, checkpoint, more, {**os.environ, **(env or {})})
    with tempfile.TemporaryDirectory(prefix="sglang-") as logs:
        log = Path(logs) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *server.arguments],
                env={**os.environ, **(env or {}), **server.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_until_up(url, process, log)
            yield SglangProcess(url=url, process=process, log=log)
        finally:
            _end(process)


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"sglang did not come up: {log.read_text(errors='replace')[-3000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 30)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    # The leader is gone; the rest of its group is killed too.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
