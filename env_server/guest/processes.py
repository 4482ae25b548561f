"""The processes of one desktop, read from /proc."""

import os
from collections.abc import Iterator

X_SERVERS = ("Xvfb", "Xorg")


def descendants(pid: int) -> Iterator[int]:
    """Those that end meanwhile may be missing."""
    for child in _children(pid):
        yield child
        yield from descendants(child)


def is_any_at_work() -> bool:
    """Whether a program of this desktop computes, or waits for a disk or a core, at this moment. The X server and the
    agent do not count: a screen that is looked at keeps them busy."""
    return any(_is_at_work(pid) for pid in descendants(os.getppid()) if pid != os.getpid())


def _children(pid: int) -> list[int]:
    """Of each of its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _is_at_work(pid: int) -> bool:
    head, _, fields = _read(f"/proc/{pid}/stat").rpartition(b") ")
    return fields[:1] in (b"R", b"D") and head.partition(b"(")[2].decode("utf-8", "replace") not in X_SERVERS


def _read(path: str) -> bytes:
    """Nothing where its process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""
