"""Starts the programs of a desktop as its user.

If the guest agent runs as that user, as in a virtual machine, this is a plain start. As process 1 of a sandbox it is
outside the user's namespace: each program enters the namespace before exec and drops the capabilities this gives."""

import contextlib
import ctypes
import os
import struct
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from .processes import children

CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION = 0x20080522
_HEADER = struct.pack("=Ii", CAPABILITY_VERSION, 0)
_NO_CAPABILITIES = bytes(24)

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_started: dict[int, subprocess.Popen[bytes]] = {}
_namespace: int | None = None
_nice = 0


def use_namespace(namespace: int, *, nice: int) -> None:
    """Programs started later enter this user namespace (a file descriptor). `nice`: the least niceness of programs
    that do not serve the agent's calls; they cannot lower it. A desktop started with a higher one keeps it, because
    lowering it needs a right that the desktop does not have."""
    global _namespace, _nice
    _namespace, _nice = namespace, max(nice, os.getpriority(os.PRIO_PROCESS, 0))


def start_program(
    command: str | Sequence[str], *, serves_calls: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Does the same as subprocess.Popen, in a new session. `serves_calls`: the program keeps the agent's priority."""
    options |= {"start_new_session": True}
    if _namespace is None:
        return subprocess.Popen[bytes](command, **options)
    with _lock:  # `reap_children` must not reap it before it is registered
        process = subprocess.Popen[bytes](
            command, preexec_fn=_become_user if serves_calls else _become_nice_user, **options
        )
        _started[process.pid] = process
    return process


def reap_children() -> None:
    """Reaps orphaned processes. Exit statuses of programs started here are left to their Popen objects."""
    with _lock:
        for pid, program in list(_started.items()):
            if program.poll() is not None:
                del _started[pid]
        for pid in children(os.getpid()):
            if pid not in _started:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _become_nice_user() -> None:
    if _libc.setpriority(os.PRIO_PROCESS, 0, _nice):
        raise OSError(ctypes.get_errno(), "setpriority")
    _become_user()


def _become_user() -> None:
    """Runs in the child between fork and exec. Only system calls: other threads may have held any lock at the fork."""
    if _libc.setns(_namespace, CLONE_NEWUSER) or _libc.capset(_HEADER, _NO_CAPABILITIES):
        raise OSError(ctypes.get_errno(), "setns")
