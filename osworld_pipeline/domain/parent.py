"""Ends a child process with its parent, by the kernel's parent-death signal, which the child sets."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def dies_with_parent(number: signal.Signals, *, parent_pid: int) -> bool:
    """Asks the kernel to send this process the signal `number` when the parent ends; False if the parent has already
    ended. The parent passes its own pid, because this process may have been reparented. Raises OSError if the kernel
    refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent_pid
