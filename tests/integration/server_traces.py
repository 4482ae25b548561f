"""Counts what a running env server holds of the machine. The counts before and after a load must be the same."""

import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path

from env_server_process import RunningServer, desktops_below, processes_below

from env_server.evaluators.metric_processes import NUM_PROCESSES

PIPES_OF_A_METRIC_PROCESS = 2
LISTENING = "0A"
"""The kernel's name for the state, in /proc/net/tcp."""


def traces_of(server: RunningServer) -> dict[str, object]:
    pid = server.process.pid
    return {
        "desktops": len(desktops_below(pid)),
        "processes": _processes(pid),
        "open files": _open_files(pid),
        "listening ports": _listening_ports(pid),
        "mounts": _mounts(pid),
        "temporary files": sorted(str(path) for path in server.temporary.rglob("*")),
        "state folder": sorted(path.name for path in server.state_dir.iterdir()),
        "control groups": _control_groups(pid),
    }


def wait_for_the_same(before: dict[str, object], server: RunningServer, limit_s: float) -> None:
    """Waits, because connections close and desktops finish starting their programs a moment after the answer."""
    deadline = time.monotonic() + limit_s
    while (now := traces_of(server)) != before:
        differing = {name: _difference(before[name], now[name]) for name in before if before[name] != now[name]}
        assert time.monotonic() < deadline, f"left over or gone: {differing}"
        time.sleep(0.1)


def _difference(before: object, now: object) -> str:
    if not isinstance(before, list) or not isinstance(now, list):
        return f"{before} and then {now}"
    more, fewer = Counter(now) - Counter(before), Counter(before) - Counter(now)
    return f"more: {dict(more)}, fewer: {dict(fewer)}"


def _processes(pid: int) -> list[str]:
    """Names of the processes, so that a difference is readable. Zombie processes are included."""
    found: list[str] = []
    for child in set(processes_below(pid)) - _metric_processes(pid):
        try:
            stat = Path(f"/proc/{child}/stat").read_text()
        except OSError:
            continue
        name, state = stat[stat.index("(") + 1 : stat.rindex(")")], stat.rpartition(")")[2].split()[0]
        found.append(f"{name} (dead)" if state == "Z" else name)
    return sorted(found)


def _open_files(pid: int) -> list[str]:
    found: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(re.sub(r"desktop-[^/]+|\[?\d+\]?", "N", os.readlink(descriptor)))
        except OSError:
            continue
    for _ in range(PIPES_OF_A_METRIC_PROCESS * len(_metric_processes(pid))):
        found.remove("socket:N")
    return sorted(found)


def _metric_processes(pid: int) -> set[int]:
    """Metric processes, which are started on first use and kept: at most two."""
    found: set[int] = set()
    for child in processes_below(pid):
        with contextlib.suppress(OSError):
            if b"metric_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(child)
    assert len(found) <= NUM_PROCESSES
    return found


def _listening_ports(pid: int) -> list[int]:
    inodes: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
        except OSError:
            continue
    ports: list[int] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def _mounts(pid: int) -> list[str]:
    """Mounts of the server and of the test: a mount that leaked out of a sandbox would show in either."""
    lines = {process: Path(f"/proc/{process}/mountinfo").read_text().splitlines() for process in (str(pid), "self")}
    return sorted(line.partition(" - ")[0].split()[4] for found in lines.values() for line in found)


def _control_groups(pid: int) -> int:
    """Number of the desktops' control groups; 0 where there is no such file system."""
    return sum(1 for _ in Path("/sys/fs/cgroup").rglob(f"osworld-desktop-{pid}-*"))
