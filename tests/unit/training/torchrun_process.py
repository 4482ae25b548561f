"""Starts a program on several ranks with torchrun, in a session of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

FOLDER = Path(__file__).parent


def torchrun(program: str, *arguments: str | Path, output: IO[str], num_ranks: int = 2) -> subprocess.Popen[bytes]:
    """`program`: a file next to this one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.Popen(
        [*launcher, str(FOLDER / program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
