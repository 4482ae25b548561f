"""Locks on files of a state folder, which the processes of all its hosts respect.

The locks are the kernel's (`flock`), which are released when their holder dies. A state on a file system without locks
has a file `lock-files` at its top. The locks of such a state are folders `NAME.rw`, which their holder refreshes; a
lock that was not refreshed for a minute is taken over. Such locks work only for the processes of one user.
"""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Self

from osworld_pipeline.errors import StoreError

MARKER = "lock-files"
"""The name of an empty file at the top of a state whose locks are files."""
POLL_S = 0.02
HEARTBEAT_S = 10.0
STALE_S = 60.0
"""A lock file that was not refreshed for this time can be taken over: its process counts as dead."""


class TakenError(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        """`holder`: the other process's id, with its host if the state has lock files; `unknown` if the lock names no
        holder."""
        super().__init__(holder)
        self.holder = holder


class Lock:
    """A lock that this process holds, as a context manager that releases it."""

    def __init__(self, release: Callable[[bool], None]) -> None:
        self._release = release

    def release(self, *, remove: bool = False) -> None:
        """`remove`: the file is not needed any more, and is removed with the lock.

        Raises:
            StoreError: another process took it over, because this one could not refresh it for a minute.
        """
        self._release(remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock(path: Path, *, timeout_s: float = 0.0, is_shared: bool = False) -> Lock:
    """Locks the file `path`, which is created if it is missing; waits for `timeout_s`. Threads exclude each other too.

    With lock files a wait may take 80 s, until the lock of a dead holder can be taken over; there is none if
    `timeout_s` is 0 and the holder is not known to be dead.

    Raises:
        TakenError: another process, or thread, holds it.
        StoreError: the files of a lock on a file system without locks are damaged.
        OSError: the file system refuses it.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    take = _take_file if uses_lock_files(path.parent) else _take
    return take(path, timeout_s, is_shared)


def remove_lock(path: Path) -> None:
    """Removes the file `path` and its lock, whose holder is dead or is this process."""
    path.unlink(missing_ok=True)
    shutil.rmtree(f"{path}.rw", ignore_errors=True)


@lru_cache(maxsize=1024)
def uses_lock_files(folder: Path) -> bool:
    """`folder`: a folder of a state, absolute. The answer is cached, until `need_file_system` creates the marker."""
    return any((parent / MARKER).exists() for parent in (folder, *folder.parents))


def _take(path: Path, timeout_s: float, is_shared: bool) -> Lock:
    deadline = time.monotonic() + timeout_s
    while (handle := _take_once(path, is_shared)) is None:
        if time.monotonic() >= deadline:
            raise TakenError(_holder_in(path))
        time.sleep(POLL_S)

    def release(remove: bool) -> None:
        if remove:
            path.unlink(missing_ok=True)
        handle.close()

    return Lock(release)


def _take_once(path: Path, is_shared: bool) -> IO[str] | None:
    """None if another process holds it."""
    while True:
        with ExitStack() as stack:
            handle = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if not _is_at(path, handle):
                continue
            if not is_shared:
                handle.truncate(0)
                handle.write(str(os.getpid()))
                handle.flush()
            stack.pop_all()
            return handle


def _is_at(path: Path, handle: IO[str]) -> bool:
    """False if its last holder has removed the file meanwhile."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    return False


def _take_file(path: Path, timeout_s: float, is_shared: bool) -> Lock:
    from filelock import SoftFileLockProtocolError, SoftReadWriteLock, Timeout

    made = SoftReadWriteLock(
        path, is_singleton=False, heartbeat_interval=HEARTBEAT_S, stale_threshold=STALE_S, poll_interval=5 * POLL_S
    )
    takeover_s = STALE_S + 2 * HEARTBEAT_S
    if timeout_s > 0 or _is_dead(_holder_in(path)):
        timeout_s = max(timeout_s, takeover_s)
    try:
        (made.acquire_read if is_shared else made.acquire_write)(timeout_s, blocking=timeout_s > 0)
    except Timeout:
        raise TakenError(_holder_in(path)) from None
    except (SoftFileLockProtocolError, RuntimeError) as error:
        raise StoreError(f"cannot lock {path}: {error}; remove {path}.rw while no process uses the state") from error
    if not is_shared:
        path.write_text(_this_process())

    def release(remove: bool) -> None:
        lost = made.compromise
        if remove and lost is None:
            remove_lock(path)
        made.release()
        made.close()
        if lost is not None:
            raise StoreError(
                f"another process took over the lock {path}, because this one did not refresh it for {STALE_S:g} s: it "
                "was stopped, or the file system did not answer; run the command again"
            )

    return Lock(release)


def _holder_in(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip() or "unknown"
    return "unknown"


def _this_process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _is_dead(holder: str) -> bool:
    """Whether this holder is known to be dead: it was a process of this host and no longer exists."""
    pid, _, host = holder.partition(" on ")
    return host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
