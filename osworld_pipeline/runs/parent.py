"""A child must not outlive its parent."""

import os
import signal
import sys

from osworld_pipeline.domain.parent import dies_with_parent


def die_with_parent(signum: signal.Signals, *, parent_pid: int) -> None:
    """Asks the kernel for `signum` when the parent dies; raises it at once if it has died already. Linux only."""
    if sys.platform == "linux" and not dies_with_parent(signum, parent_pid=parent_pid):
        os.kill(os.getpid(), signum)
