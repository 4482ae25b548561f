"""The embedded Ray: a local Ray, started while it is needed, for users without a cluster."""

import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.errors import DependencyError, EnvServerError
from osworld_pipeline.runs.launch.ray_head import READY
from osworld_pipeline.runs.parent import stop_session
from osworld_pipeline.runs.placement import RayResources

READY_TIMEOUT_S = 120.0
STOP_GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    url: str
    """URL of the dashboard, which accepts jobs."""
    token: str | None
    """Bearer token; it permits running code on the cluster."""


@contextmanager
def local_ray(
    log_path: Path,
    wanted: Sequence[RayResources],
    *,
    env_vars: Mapping[str, str] | None = None,
    mailbox: Path | None = None,
) -> Iterator[RayCluster]:
    """Runs a Ray that accepts only clients with the token of this run, and cleans up at the end. Processes that need
    `wanted` fit into it at the same time: CPUs and resources of the user are only counts. All its processes have
    `env_vars`. If this process is killed, Ray removes `mailbox` as it ends.

    Raises:
        DependencyError: Ray is not installed.
        EnvServerError: Ray did not start; names the log.
    """
    token = secrets.token_hex(32)
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        token_path = folder / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(token)
        num_cpus = max(len(os.sched_getaffinity(0)), math.ceil(sum(one.cpus for one in wanted)))
        counts: Counter[str] = Counter()
        for one in wanted:
            counts.update(one.custom)
        arguments = [str(folder), str(os.getpid()), str(num_cpus), json.dumps(counts)]
        arguments += [str(mailbox)] if mailbox else []
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "osworld_pipeline.runs.launch.ray_head", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,  # passed on, not read
                    **(env_vars or {}),
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN_PATH": str(token_path),  # else Ray writes one into the home folder
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_prestart_worker_first_driver": "0",  # no idle worker for each CPU
                    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine is not preempted
                },
            )
        try:
            yield RayCluster(url=_wait_ready(process, folder / READY, log_path), token=token)
        finally:
            stop_session(process, grace_s=STOP_GRACE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log_path: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if ready.exists():
            return str(json.loads(ready.read_text())["url"])
        if process.poll() is not None:
            if "No module named 'ray'" in log_path.read_text(errors="replace")[-2000:]:
                raise DependencyError("the Ray launcher needs Ray: install the extra `ray` (osworld-pipeline[ray])")
            raise EnvServerError(f"Ray ended with status {process.returncode} during its start; see {log_path}")
        time.sleep(0.05)
    raise EnvServerError(f"Ray was not ready after {READY_TIMEOUT_S:.0f} s; see {log_path}")
