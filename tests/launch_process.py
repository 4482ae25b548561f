"""Launches one program as a Dagster step does, in a process of its own that tests may kill.

`python launch_process.py REQUEST.json`: {on, program, job, state_root, num_processes}. Prints messages as JSON
lines, at the end {"kind": "returned", "result"} or {"kind": "failed", "message", "allow_retries"}.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import dagster as dg

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.__main__ import PROGRAMS
from osworld_pipeline.runs.job import Job
from osworld_pipeline.runs.messages import Message
from resources.launcher import Launcher


def launch(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the last line as a dict and prints the others."""
    outcome: dict[str, Any] = {}

    def say(message: Message) -> None:
        print(message.to_line(), flush=True)

    @dg.asset
    def launched(context: dg.AssetExecutionContext, launcher: Launcher) -> None:
        try:
            result = launcher.launch(
                context,
                request["program"],
                _as_sent(request["program"], request["job"]),
                say,
                state=StateDir(Path(request["state_root"])),
                num_processes=request["num_processes"],
            )
            outcome.update({"kind": "returned", "result": result})
        except dg.Failure as failure:
            outcome.update(
                {"kind": "failed", "message": failure.description, "allow_retries": bool(failure.allow_retries)}
            )
            raise

    with dg.DagsterInstance.ephemeral() as instance:
        job = dg.Definitions(assets=[launched], resources={"launcher": Launcher()})
        job.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance,
            raise_on_error=False,
            run_config={
                "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                "resources": {"launcher": {"config": {"runs_on": request["on"]}}},
            },
        )
    return outcome


def _as_sent(program: str, job: dict[str, Any]) -> Job | dict[str, Any]:
    """The job as its model for a program of ours, and unchanged for a program of the user."""
    if program not in PROGRAMS:
        return job
    main = importlib.import_module(PROGRAMS[program]).main
    return next(iter(inspect.signature(main).parameters.values())).annotation.model_validate(job)


if __name__ == "__main__":
    print(json.dumps(launch(json.loads(Path(sys.argv[1]).read_text()))), flush=True)
