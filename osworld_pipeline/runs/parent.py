"""Child processes: ended with their parent, or stopped with their session."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from osworld_pipeline.domain.parent import dies_with_parent


def die_with_parent(signum: signal.Signals, *, parent_pid: int) -> None:
    """Asks the kernel to send `signum` when the parent dies; sends it at once if the parent is already dead. Linux
    only."""
    if sys.platform == "linux" and not dies_with_parent(signum, parent_pid=parent_pid):
        os.kill(os.getpid(), signum)


def has_lost_parent(parent_pid: int, *, limit_s: float = 0.0) -> bool:
    """Whether the parent has ended, or ends within `limit_s`. The kernel sends the parent-death signal when the thread
    that started this process ends; in a killed process the other threads may end a little later."""
    deadline = time.monotonic() + limit_s
    while os.getppid() == parent_pid:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def stop_session(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """`process` leads a session. SIGTERM lets it end in order; after the grace period the rest of its session is
    killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
