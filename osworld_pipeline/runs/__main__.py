"""Runs one program in this process. Reads the job from stdin and reports progress through Dagster Pipes if a session is
open.
A job that names its `parent_pid` ends when that process ends.

Exit status: 0 success; 1 a defect of the program, with a traceback; 2 an error that a retry cannot fix; 3 an error that
a retry may fix; 143 stopped by SIGTERM or SIGINT.
"""

import importlib
import inspect
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from osworld_pipeline.errors import PipelineError, RecipeError
from osworld_pipeline.programs.short_process import run_process
from osworld_pipeline.runs.messages import Failed, Message, Report, Result, problems_in
from osworld_pipeline.runs.metrics.serving import observed_program
from osworld_pipeline.runs.parent import die_with_parent
from osworld_pipeline.runs.shared_state import state_of
from osworld_pipeline.wire.tracing import start_tracing

PROGRAMS: Mapping[str, str] = {
    "record_sources": "osworld_pipeline.runs.sources.record_sources",
    "make_base": "osworld_pipeline.runs.base.make_base",
    "train_sft": "osworld_pipeline.runs.sft.train_sft",
    "train_gspo": "osworld_pipeline.runs.gspo.train_gspo",
    "flywheel": "osworld_pipeline.runs.flywheel.flywheel",
    "evaluate": "osworld_pipeline.runs.evaluate.evaluate",
    "collect": "osworld_pipeline.runs.collect.collect",
    "verify_replay": "osworld_pipeline.runs.verify_replay.verify_replay",
}
"""The module of each, whose `main(job, report)` is run."""
EXIT_FATAL, EXIT_RETRYABLE, EXIT_STOPPED = 2, 3, 143
REPORT_TO_STDOUT = "--print"
RANK_OF = "--rank-of"
"""Followed by the pid of the torchrun that started this rank."""


class Stopped(BaseException):
    """SIGTERM arrived; unwinds every `finally` on the way out."""


def main(argv: list[str]) -> int:
    if not argv or program_module(argv[0]) is None:
        print(f"usage: python -m osworld_pipeline.runs {{{'|'.join(PROGRAMS)}}} < job.json", file=sys.stderr)
        return EXIT_FATAL
    job = read_job()
    signal.signal(signal.SIGTERM, stop)
    if RANK_OF in argv:
        # Only SIGKILL ends a rank that waits in a collective: Python handlers do not run. Checkpoints are atomic.
        die_with_parent(signal.SIGKILL, parent_pid=int(argv[argv.index(RANK_OF) + 1]))
        if os.environ["RANK"] != "0":
            return run_program(argv[0], job, write_final_message)
    elif job.get("parent_pid"):
        die_with_parent(signal.SIGTERM, parent_pid=job["parent_pid"])
    if REPORT_TO_STDOUT in argv:
        return run_program(argv[0], job, lambda message: print(message.to_line(), flush=True))
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:

        def report(message: Message) -> None:
            write_final_message(message)
            pipes.report_custom_message(message.model_dump())

        return run_program(argv[0], job, report)


def program_module(program: str) -> str | None:
    """The module of `main(job, report)`; None if there is no such program. A dotted name is a module of the user."""
    return PROGRAMS.get(program) or (program if "." in program else None)


def read_job() -> dict[str, Any]:
    """Reads stdin. Ranks share it: if it is a file, each rank reads it from the beginning."""
    status = os.fstat(0)
    if stat.S_ISREG(status.st_mode):
        return json.loads(os.pread(0, status.st_size, 0))
    return json.loads(sys.stdin.read())


def run_program(program: str, job: dict[str, Any], report: Report) -> int:
    """The last message is a Result or Failed, unless a defect raises another exception; returns the exit status."""
    try:
        start_tracing("osworld-pipeline")
        with observed_program(program, job, report) as observed:
            program_main = importlib.import_module(str(program_module(program))).main
            result = program_main(read_input(program, program_main, job), observed)
    except PipelineError as error:
        report(Failed(type=type(error).__name__, message=str(error), retryable=error.is_retryable))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_RETRYABLE if error.is_retryable else EXIT_FATAL
    except (Stopped, KeyboardInterrupt):
        report(Failed(type="Stopped", message=f"{program} was stopped", retryable=False))
        return EXIT_STOPPED
    if "state_root" in job and os.environ.get("RANK", "0") == "0":
        # Imported here, so that a program that fails imports nothing more.
        from osworld_pipeline.store.merging import merge_parts
        from osworld_pipeline.store.packing import pack_some

        state = state_of(job)
        merge_parts(state.trajectories)
        pack_some(state)
    report(Result(result=result))
    return 0


def read_input(program: str, program_main: Callable[..., Any], job: dict[str, Any]) -> Any:
    """`job` as the model that `main` takes; a program of the user may take it as it is.

    Raises:
        RecipeError: it is not valid; names the fields, but no values, because a job may contain tokens.
    """
    from pydantic import ValidationError

    from osworld_pipeline.runs.job import Job

    kind = next(iter(inspect.signature(program_main).parameters.values())).annotation
    if not (isinstance(kind, type) and issubclass(kind, Job)):
        return job
    try:
        return kind.model_validate(job)
    except ValidationError as error:
        raise RecipeError(
            f"the job of {program} is not valid ({problems_in(error)}): start it with this version"
        ) from None


def write_final_message(message: Message) -> None:
    """Writes the failure of a rank to the file that torchrun provides; ranks other than 0 report nothing else."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if isinstance(message, Failed) and path:
        with open(path, "w") as file:
            json.dump({**message.model_dump(), "timestamp": time.time()}, file)


def stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
