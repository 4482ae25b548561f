"""A single-machine Ray, as a process that ends all of Ray when it ends or its launcher dies.

Ray's own processes are set to die with this one. The processes that they started (workers, jobs, their monitors) become
its children then and are killed.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from osworld_pipeline.runs.parent import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
READY = "ready.json"
ADDRESS_FILE = "ray_current_cluster"
"""Ray's own name; `ray start` writes it too."""
REAP_LIMIT_S = 10.0
OBJECT_STORE_BYTES = 512 << 20
"""Object store memory. Episodes and jobs pass through it; screenshots and weights do not."""


class Stopped(BaseException):
    """SIGTERM arrived."""


def main(argv: list[str]) -> int:
    """`argv`: scratch folder (with a short path, because it holds sockets), pid of the launcher, number of CPUs,
    counts of other resources as JSON, and further paths to remove if the launcher was killed and cannot remove them."""
    folder, parent_pid, num_cpus, resources = Path(argv[0]), int(argv[1]), int(argv[2]), json.loads(argv[3])
    signal.signal(signal.SIGTERM, _stop)
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        die_with_parent(signal.SIGTERM, parent_pid=parent_pid)
        import ray

        context: Any = ray.init(
            num_cpus=num_cpus,
            resources=resources,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "ray"),
        )
        signal.signal(signal.SIGTERM, _stop)  # replaces Ray's handler
        # Without this file a job connects to any Ray that it finds on this machine.
        (folder / "ray" / ADDRESS_FILE).write_text(context.address_info["gcs_address"])
        ready = {"url": f"http://{context.address_info['webui_url']}"}
        (folder / "ready.tmp").write_text(json.dumps(ready))
        (folder / "ready.tmp").rename(folder / READY)
        while True:
            signal.pause()
    except Stopped:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants(limit_s=REAP_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)
        if os.getppid() != parent_pid:
            for left in argv[4:]:
                shutil.rmtree(left, ignore_errors=True)


def kill_descendants(*, limit_s: float) -> None:
    """Kills and reaps all descendants, including those re-parented to this process. Linux only."""
    deadline = time.monotonic() + limit_s
    while (pids := _children()) and time.monotonic() < deadline:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for children in lists for pid in children.read_text().split()]


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    # Ray's own threads must not delay the exit after the cleanup.
    os._exit(main(sys.argv[1:]))
