"""What every bubblewrap sandbox of ours has in common: the system's folders in it, a socket without a name that leads
into it, and an end that leaves nothing behind."""

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
    """A listening Unix socket whose name is gone at once, and a handle to reach it by (/proc/self/fd/N). So there is
    no file to leave behind, no limit on the path's length, and nothing in the guest that could stand in for it."""
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
    """Returns once every process that was started in it has ended. A program without `has_walls` is waited for alone.

    Raises:
        ReplicaError: one outlives `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s):
            if has_walls:
                await _kill_until_silent(process, stderr_tail)
            await stderr_tail.is_silent.wait()
            while process.poll() is None:  # noqa: ASYNC110 - a moment after its last descriptor
                await asyncio.sleep(REAP_INTERVAL_S)
    except TimeoutError as error:
        raise ReplicaError(f"{what} outlived SIGKILL for {limit_s:g} s") from error


async def _kill_until_silent(process: subprocess.Popen[bytes], stderr_tail: StderrTail) -> None:
    """Again and again, until the last process has closed its standard error: what is killed while the sandbox is being
    made may be a helper whose work was done already, and the making goes on."""
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
    """Those of its main thread; none once it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_inside_first(process: subprocess.Popen[bytes]) -> None:
    """Kills the sandbox's process 1, whose death bubblewrap sees and then ends by itself. Were bubblewrap killed first,
    its child would be left for the host's process 1 to reap, which a container's often does not."""
    inside = children_of(process.pid)
    for pid in inside:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if not inside:
        process.kill()
