"""Runs one program in this process: job from stdin, progress through Dagster Pipes where there is a session. A job that
names its `parent_pid` ends when that process does.

Exit status: 0 done; 2 an error that a retry cannot mend; 3 one that it may; 143 told to stop.
"""

import importlib
import json
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from osworld_pipeline.errors import EngineError, EnvServerError, PipelineError, ReplicaError
from osworld_pipeline.runs.parent import die_with_parent

PROGRAMS = ("record_sources", "make_base", "train_sft", "train_gspo", "evaluate", "verify_replay")
EXIT_FATAL, EXIT_RETRYABLE, EXIT_STOPPED = 2, 3, 143
RETRYABLE = (EnvServerError, ReplicaError, EngineError)
REPORT_TO_STDOUT = "--print"


class Stopped(BaseException):
    """SIGTERM arrived; unwinds every `finally` on the way out."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PROGRAMS:
        print(f"usage: python -m osworld_pipeline.runs {{{'|'.join(PROGRAMS)}}} < job.json", file=sys.stderr)
        return EXIT_FATAL
    job = json.loads(sys.stdin.read())
    signal.signal(signal.SIGTERM, _stop)
    if "parent_pid" in job:
        die_with_parent(signal.SIGTERM, parent_pid=job["parent_pid"])
    if REPORT_TO_STDOUT in argv:
        return _run(argv[0], job, lambda message: print(json.dumps(message), flush=True))
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        return _run(argv[0], job, pipes.report_custom_message)


def _run(program: str, job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> int:
    """Reports `{"kind": "result"|"error", ...}` as its last message."""
    try:
        result = importlib.import_module(f"osworld_pipeline.runs.{program}").main(job, report)
    except PipelineError as error:
        retryable = isinstance(error, RETRYABLE)
        report({"kind": "error", "type": type(error).__name__, "message": str(error), "retryable": retryable})
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_RETRYABLE if retryable else EXIT_FATAL
    except (Stopped, KeyboardInterrupt):
        report({"kind": "error", "type": "Stopped", "message": f"{program} was told to stop", "retryable": False})
        return EXIT_STOPPED
    report({"kind": "result", "result": result})
    return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
