"""Replaces the sandbox's process 1 if there is no sandbox: keeps one desktop's processes below itself, and kills all of
them and removes their folder when the agent or the host process ends, or on a signal."""

import argparse
import ctypes
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

from .processes import descendants
from .seccomp import install_filter

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MAX_DATA_BYTES = 4 * 1024 * 1024 * 1024
GRACE_S = 1.0
"""Time for programs to exit by themselves; the X server then removes its lock file."""
END_LIMIT_S = 8.0
_LIFELINE = 2
"""Standard error is a pipe to the host process. If its reading end is closed, the host process has died and the desktop
must end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("agent", nargs="+", help="the guest agent's command")
    arguments = parser.parse_args()
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    keep_together()
    folder = Path(tempfile.mkdtemp(prefix="desktop-plain-"))
    try:
        agent_pid = start_agent(arguments.agent, arguments.image, folder)
        poll = select.poll()
        poll.register(wake_read, select.POLLIN)
        poll.register(_LIFELINE, 0)
        while not _is_over(poll.poll(), wake_read, agent_pid):
            pass
    finally:
        end_all()
        shutil.rmtree(folder, ignore_errors=True)


def keep_together() -> None:
    """Descendants stay below this process, none gains rights by exec, and this process ends with the host process.
    Also installs the system-call filter and the limits of core dumps and data."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in (
        (PR_SET_PDEATHSIG, signal.SIGTERM),
        (PR_SET_CHILD_SUBREAPER, 1),
        (PR_SET_NO_NEW_PRIVS, 1),
    ):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    install_filter()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))


def start_agent(argv: list[str], image: Path, folder: Path) -> int:
    """Starts the agent with its own home and runtime folder, without the user's environment."""
    home, runtime = folder / "home", folder / "run"
    shutil.copytree(image / "home/user", home)
    runtime.mkdir(mode=0o700)
    site = next((image / "opt/local/lib").glob("python*/dist-packages"))
    environment = {
        "HOME": str(home),
        "USER": "user",
        "LOGNAME": "user",
        "SHELL": "/bin/bash",
        "PATH": f"{image}/opt/local/bin:/usr/local/bin:/usr/bin:/bin:/usr/games",
        "PYTHONPATH": str(site),
        "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(runtime),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
        "XDG_SESSION_TYPE": "x11",
        "XDG_CURRENT_DESKTOP": "X-Generic",
        "TERM": "xterm-256color",
        "TMPDIR": str(folder),
    }
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            os.chdir(home)
            os.execve(argv[0], [*argv, "--runtime", str(runtime)], environment)  # noqa: S606 - no shell is wanted
        finally:
            os._exit(71)
    return pid


def end_all() -> None:
    """Sends TERM to all descendants, and after GRACE_S KILL, until none is left or END_LIMIT_S has passed."""
    started_at = time.monotonic()
    while True:
        pids = list(descendants(os.getpid()))
        passed_s = time.monotonic() - started_at
        if not pids or passed_s > END_LIMIT_S:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM if passed_s < GRACE_S else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        _reap()


def _is_over(events: list[tuple[int, int]], wake_read: int, agent_pid: int) -> bool:
    if any(file == _LIFELINE for file, _ in events):
        return True
    return bool(set(os.read(wake_read, 4096)) - {signal.SIGCHLD}) or agent_pid in _reap()


def _reap() -> set[int]:
    """The children that have ended since the last call."""
    ended = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.add(pid)
