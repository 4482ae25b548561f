"""The common parts of all our bubblewrap sandboxes: the system's folders in them, an unnamed socket into them, and a
clean end."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from env_server.providers.stderr_tail import StderrTail
from osworld_pipeline.errors import ReplicaError

STOP_LIMIT_S = 10.0
KILL_INTERVAL_S = 0.1
REAP_INTERVAL_S = 0.002
SYSTEM_FOLDERS = (
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
)  # fmt: skip


def nameless_listener() -> tuple[socket.socket, int]:
    """A listening Unix socket whose name is removed at once, and a descriptor N with which this process reaches it as
    /proc/self/fd/N. So there is no file to clean up, no limit on the path's length, and no file in the guest that could
    replace it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with tempfile.TemporaryDirectory(prefix="desktop-") as folder:
            path = os.path.join(folder, "s")
            listener.bind(path)
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener, handle


async def end_sandbox(
    process: subprocess.Popen[bytes],
    stderr_tail: StderrTail,
    *,
    what: str,
    has_walls: bool = True,
    limit_s: float = STOP_LIMIT_S,
) -> None:
    """Kills every process in the sandbox, and returns once all have ended. Without `has_walls` there is no sandbox, and
    it only waits until the program has ended.

    Raises:
        ReplicaError: a process is still alive after `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s):
            if has_walls:
                await _kill_until_silent(process, stderr_tail)
            await stderr_tail.is_silent.wait()
            while process.poll() is None:  # noqa: ASYNC110 - a moment after its last descriptor
                await asyncio.sleep(REAP_INTERVAL_S)
    except TimeoutError as error:
        sent = "SIGKILL" if has_walls else "SIGTERM"
        raise ReplicaError(f"{what} is still running {limit_s:g} s after {sent}") from error


async def _kill_until_silent(process: subprocess.Popen[bytes], stderr_tail: StderrTail) -> None:
    """Repeats until the last process has closed its standard error: a kill during the set-up of the sandbox may hit a
    helper that has already finished, and the set-up continues."""
    while not stderr_tail.is_silent.is_set():
        if process.poll() is None:
            _kill_inside_first(process)
        else:
            # Killed before its child had set the parent-death signal: the child is orphaned.
            stderr_tail.kill_writers()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_INTERVAL_S):
                await stderr_tail.is_silent.wait()


def children_of(pid: int) -> list[int]:
    """Children of the main thread of process `pid`; empty once the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_inside_first(process: subprocess.Popen[bytes]) -> None:
    """Kills the sandbox's process 1, after which bubblewrap exits by itself. If bubblewrap were killed first, its child
    would be left to the host's process 1, which often does not reap it in a container."""
    inside = children_of(process.pid)
    for pid in inside:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if not inside:
        process.kill()
