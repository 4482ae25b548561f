"""A child must not outlive its parent: the kernel's parent-death signal, set by the child itself."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: signal.Signals) -> None:
    """Asks the kernel for `signum` when the parent dies; exits at once where it died before the call. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, int(signum))
    if os.getppid() == 1:
        os.kill(os.getpid(), signum)
