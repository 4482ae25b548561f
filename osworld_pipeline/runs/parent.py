"""A child must not outlive its parent: the kernel's parent-death signal, set by the child itself."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals, *, parent_pid: int) -> None:
    """Asks the kernel for `signum` when the parent dies; raises it at once where it died before the call. Linux only.

    The parent says who it is, because by the time we ask it may be dead and somebody else our parent.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)
