"""A program for tests of the launchers; `job["act"]` says what it does. Its processes are found by `job["mark"]`,
which the program sets as its name."""

import ctypes
import os
import time
from typing import Any

from osworld_pipeline.errors import EngineError, TrainingError
from osworld_pipeline.runs.messages import Progress, Report

PR_SET_NAME = 15


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    ctypes.CDLL("libc.so.6").prctl(PR_SET_NAME, job["mark"].encode())
    rank = os.environ.get("RANK", "0")
    report(Progress(done=1, total=2, note="begun"))
    if job["act"] == "sum":
        report(Progress(done=2, total=2, note="done"))
        return {"sum": sum(job["numbers"]), "secret": job.get("secret")}
    if job["act"] == "sum_of_ranks":
        return sum_of_ranks()
    if job["act"] == "fail" and rank == job.get("rank", "0"):
        raise TrainingError("the loss is not finite")
    if job["act"] == "fault" and rank == job.get("rank", "0"):
        raise EngineError("the server is gone")
    wait(clean_up=job.get("clean_up"))
    return {}


def sum_of_ranks() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from osworld_pipeline.training.distributed.process_group import open_process_group

    with open_process_group() as ranks:
        total = torch.tensor([float(ranks.rank + 1)])
        dist.all_reduce(total)
        return {"sum": float(total), "world_size": ranks.world_size}


def wait(*, clean_up: str | None) -> None:
    """Waits for a minute. If the program is stopped before that, it notes it in the file `clean_up`."""
    try:
        time.sleep(60)
    finally:
        if clean_up:
            with open(f"{clean_up}-{os.environ.get('RANK', '0')}", "w") as file:
                file.write("clean")
