"""A child must not outlive its parent: the kernel's parent-death signal, set by the child itself."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def dies_with_parent(number: signal.Signals, *, parent_pid: int) -> bool:
    """Asks the kernel for `number` when the parent ends, however it ends; False where it has ended already. The parent
    says who it is, because by now somebody else may be ours. OSError where the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent_pid
