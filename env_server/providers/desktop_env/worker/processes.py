"""Lists and kills the descendants of a process, and sets kernel options so that none is left behind."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_ROUNDS = 50


def die_with_parent(parent_pid: int) -> None:
    """Sends this process SIGTERM when its parent, process `parent_pid`, ends. ProcessLookupError if the parent has
    already ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError("the kernel refused prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"the parent, process {parent_pid}, is gone")


def adopt_orphans() -> None:
    """Descendants of this process stay below it, also if a process in between ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """Its living children."""
    return {child for child, parent in _parents().items() if parent == pid}


def below(pid: int) -> set[int]:
    """Every living descendant of `pid`."""
    parents = _parents()
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def kill_below(pid: int) -> None:
    """Kills every descendant of `pid` repeatedly, because a dying one may just have started another."""
    for _ in range(_MAX_ROUNDS):
        children = below(pid)
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)


def _parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
    return parents
