"""A single-machine Ray, as a process that ends all of Ray when it ends or its launcher dies.

Ray's own processes end with `ray start`, and `ray start` ends with this process. The processes that they started
(workers, jobs, their monitors) then become children of this process, which kills them.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from osworld_pipeline.runs.launch.mailbox import remove_orphan
from osworld_pipeline.runs.parent import die_with_parent, has_lost_parent

PR_SET_CHILD_SUBREAPER = 36
READY = "ready.json"
REAP_LIMIT_S = 10.0
OBJECT_STORE_BYTES = 512 << 20
"""Object store memory. Episodes and jobs pass through it; screenshots and weights do not."""


class Stopped(BaseException):
    """SIGTERM arrived."""


def main(argv: list[str]) -> int:
    """`argv`: scratch folder (with a short path, because it holds sockets), pid of the launcher, number of CPUs,
    counts of other resources as JSON, and the mailbox to remove if the launcher was killed and cannot remove it."""
    folder, parent_pid, num_cpus, resources = Path(argv[0]), int(argv[1]), int(argv[2]), json.loads(argv[3])
    signal.signal(signal.SIGTERM, _stop)
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        die_with_parent(signal.SIGTERM, parent_pid=parent_pid)
        port, dashboard_port = free_ports(2)
        head = subprocess.Popen(
            start_command(
                *(
                    "--head",
                    "--block",
                    f"--port={port}",
                    f"--num-cpus={num_cpus}",
                    f"--resources={json.dumps(resources)}",
                ),
                *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
                *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder / 'ray'}"),
            ),
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, signal.SIGKILL, parent_pid=os.getpid()),
        )
        while not _accepts_connections(dashboard_port):
            if head.poll() is not None:
                return head.returncode or 1
            time.sleep(0.05)
        ready = {"url": f"http://127.0.0.1:{dashboard_port}"}
        (folder / "ready.tmp").write_text(json.dumps(ready))
        (folder / "ready.tmp").rename(folder / READY)
        return head.wait() or 1
    except Stopped:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants(limit_s=REAP_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)
        if has_lost_parent(parent_pid):
            for left in argv[4:]:
                remove_orphan(Path(left))


def start_command(*options: str) -> list[str]:
    """`ray start` on loopback. Unlike `ray.init` it lets the agent of a node choose a free port, so that several Rays
    run on one machine."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
        *("--dashboard-agent-listen-port=0", "--include-log-monitor=false", *options),
    ]


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def kill_descendants(*, limit_s: float) -> None:
    """Kills and reaps all descendants, including those re-parented to this process. Linux only."""
    deadline = time.monotonic() + limit_s
    while (pids := _children()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has just ended
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
    sys.exit(main(sys.argv[1:]))
