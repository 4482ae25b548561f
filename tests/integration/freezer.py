"""Frozen processes: they do not run, so SIGKILL does not end them either, like a process that waits for a bad disk."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from env_server_process import processes_below

FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def frozen(top: int) -> Iterator[None]:
    """Freezes a process and all its descendants, so that SIGKILL does not end them inside the block."""
    if os.geteuid() != 0 or not (FREEZER / "tasks").exists():
        pytest.skip("a process is frozen by a control group of version 1 and root alone")
    group = FREEZER / f"osworld-test-{os.getpid()}"
    group.mkdir()
    try:
        for pid in (top, *processes_below(top)):
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        until = time.monotonic() + 10
        while (group / "cgroup.procs").read_text():
            assert time.monotonic() < until, "the desktop lives"
            time.sleep(0.05)
        group.rmdir()
