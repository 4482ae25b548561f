"""Starts a program on several ranks with torchrun, in a session of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def torchrun(program: str, *arguments: str | Path, num_ranks: int = 2) -> subprocess.Popen[str]:
    """`program`: a file beside this one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.Popen(
        [*launcher, str(FOLDER / program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
