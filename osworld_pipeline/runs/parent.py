"""Ends a child process with its parent."""

import os
import signal
import sys

from osworld_pipeline.domain.parent import dies_with_parent


def die_with_parent(signum: signal.Signals, *, parent_pid: int) -> None:
    """Asks the kernel to send `signum` when the parent dies; sends it at once if the parent is already dead. Linux
    only."""
    if sys.platform == "linux" and not dies_with_parent(signum, parent_pid=parent_pid):
        os.kill(os.getpid(), signum)
