"""The processes of one desktop, read from /proc."""

import os
from collections.abc import Iterator

X_SERVERS = (b"Xvfb", b"Xorg")
ENDED_FROM_INSIDE = 87
"""Exit status of process 1 after a program of the desktop disabled it. Only process 1 itself can set this status."""


def descendants(pid: int) -> Iterator[int]:
    """Processes that end meanwhile may be missing."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Processes that end meanwhile may be missing."""
    return [int(child) for thread in _threads(pid) for child in _read(f"{thread}/children").split()]


def is_any_at_work(*, with_x_server: bool = False) -> bool:
    """Whether a program of this desktop is computing, or waits for a disk or a core, at this moment. The agent is not
    counted, nor is the X server by default: screenshots keep them busy."""
    return any(
        is_at_work(pid)
        for pid in descendants(os.getppid() or os.getpid())
        if pid != os.getpid() and (with_x_server or not _is_x_server(pid))
    )


def _is_x_server(pid: int) -> bool:
    return _read(f"/proc/{pid}/comm").strip() in X_SERVERS


def is_at_work(pid: int) -> bool:
    """Checks every thread: a program may load in a thread that its window does not wait for."""
    return any(_read(f"{thread}/stat").rpartition(b") ")[2][:1] in (b"R", b"D") for thread in _threads(pid))


def _threads(pid: int) -> list[str]:
    """The /proc folders of its threads."""
    folder = f"/proc/{pid}/task"
    try:
        return [f"{folder}/{thread}" for thread in os.listdir(folder)]
    except OSError:
        return []


def _read(path: str) -> bytes:
    """Empty if the process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""
