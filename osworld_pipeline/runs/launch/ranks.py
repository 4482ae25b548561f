"""Starts the ranks of one program on this machine with torchrun, in a process that ends with its launcher and reports
in one sentence why a rank failed. Its stdin is the job's file, which every rank reads.
"""

import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.programs.short_process import run_process
from osworld_pipeline.runs.messages import Failed
from osworld_pipeline.runs.parent import die_with_parent, has_lost_parent

EXIT_RETRYABLE, EXIT_STOPPED = 3, 143
PARENT_LIMIT_S, REMOVE_LIMIT_S = 2.0, 10.0
FAILURE = "failure.json"
"""A file in the scratch folder: the message Failed about a killed rank, or else about the rank that failed first."""


def main(argv: list[str]) -> int:
    """`argv`: program, number of ranks, pid of the launcher, the launcher's scratch folder."""
    program, num_ranks, parent_pid, scratch = argv[0], int(argv[1]), int(argv[2]), Path(argv[3])
    die_with_parent(signal.SIGTERM, parent_pid=parent_pid)
    # Without this, torch gives every rank one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    command = ["--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=0", f"--log-dir={scratch / 'ranks'}"]
    command += ["--module", "osworld_pipeline.runs", program, "--rank-of", str(os.getpid())]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        # A killed rank is the cause; the ranks that wait for it report their failure at the same moment.
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        words: dict[str, Any] = dict(failure.error_file_data)
        if "retryable" in words:
            last = Failed(type=words["type"], message=words["message"], retryable=words["retryable"])
        else:
            reason = _unsaid(program, rank, num_ranks, failure.exitcode)
            last = Failed(type="RankFailed", message=reason, retryable=failure.exitcode < 0)
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / FAILURE).write_text(last.to_line())
        return failure.exitcode if failure.exitcode > 0 else EXIT_RETRYABLE
    except SignalException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come again when the launcher's last thread ends
        # If the launcher goes on, it has cancelled the step, and removes the folder itself.
        if has_lost_parent(parent_pid, limit_s=PARENT_LIMIT_S):
            _remove(scratch)
        return EXIT_STOPPED
    finally:
        if has_lost_parent(parent_pid):
            _remove(scratch)
    return 0


def _remove(scratch: Path) -> None:
    """Removes the folder of a killed launcher. A rank that is ending may still write a file into it."""
    deadline = time.monotonic() + REMOVE_LIMIT_S
    while scratch.exists() and time.monotonic() < deadline:
        shutil.rmtree(scratch, ignore_errors=True)
        time.sleep(0.05)
    if scratch.exists():
        print(f"{scratch} could not be removed: remove it", file=sys.stderr)


def _unsaid(program: str, rank: int, num_ranks: int, exit_code: int) -> str:
    """The message about a rank that ended without a report."""
    if exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name} (out of memory?)"
    else:
        how = f"ended with status {exit_code}; its traceback is in the log"
    return f"rank {rank} of {program} ({num_ranks} ranks) {how}"


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
