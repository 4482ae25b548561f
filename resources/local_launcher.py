"""Runs a program of `osworld_pipeline.runs` in its own process group and receives its messages through Dagster Pipes.

If the step ends early, the program gets SIGTERM; when it has ended, or after a grace period, its group gets SIGKILL.
The program also sets the kernel's parent-death signal. A cancelled step is not retried. Several ranks are started by
torchrun, which forwards SIGTERM; if it is killed, the kernel kills them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dagster as dg
from dagster import DagsterExecutionInterruptedError
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.launch.fork_server import ForkedProgram, start_warm
from osworld_pipeline.runs.launch.ranks import FAILURE
from osworld_pipeline.runs.messages import Failed, Last, Report, Result, parse_message
from osworld_pipeline.runs.placement import Placement
from osworld_pipeline.tracking.client import import_in_background
from resources.message_file import MessageFile
from resources.program_launcher import ProgramLauncher

Process = subprocess.Popen[bytes] | ForkedProgram
POLL_S = 0.2
PROGRAM_ENV = {
    "TQDM_DISABLE": "1",  # progress bars of libraries would fill the log
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning OpenMP threads starve the desktops of a busy machine
}


class LocalLauncher(ProgramLauncher):
    """Starts programs on this machine."""

    kind: Literal["local"] = "local"
    grace_s: float = Field(default=20.0, description="Seconds between TERM and KILL; longer than saving a checkpoint.")

    def launch(
        self,
        context: dg.AssetExecutionContext,
        program: str,
        job: Mapping[str, Any],
        on_message: Report,
        *,
        state: StateDir,
        num_processes: int = 1,
        placement: Placement = Placement.RANK,
    ) -> dict[str, Any]:
        """See Launcher.launch. All programs are placed here."""
        state.logs.mkdir(parents=True, exist_ok=True)
        log_path = state.program_log(program)
        with (
            _open_session(context, messages := MessageFile()) as session,
            tempfile.TemporaryDirectory(prefix="ranks-") if num_processes > 1 else nullcontext("") as scratch,
            log_path.open("ab") as log,
        ):
            context.log.info(f"{program} writes to {log_path}")
            environment = {**PROGRAM_ENV, **session.get_bootstrap_env_vars()}
            process: Process | None = None
            if num_processes == 1:
                process = start_warm(program, partial(_job_file, job), output=log.fileno(), environment=environment)
            if process is not None:
                import_in_background()  # this process is idle now, and records in MLflow what the program has done
            if process is None:
                command = _command(program, num_processes, Path(scratch))
                process = _start(command, job, output=log.fileno(), environment=environment)
            try:
                last = self._listen(process, session, messages, on_message)
            except BaseException as error:
                self._stop_group(context, process, type(error).__name__)
                if isinstance(error, DagsterExecutionInterruptedError):
                    raise dg.Failure(f"{program} was cancelled", allow_retries=False) from error
                raise
            self._kill_group(process)
            failure = Path(scratch, FAILURE)
            if (
                num_processes > 1 and failure.exists()
            ):  # the error of the rank that failed first; rank 0 only received a request to stop
                last = Failed.model_validate(json.loads(failure.read_text()))
        if process.returncode == 0 and isinstance(last, Result):
            return last.result
        if isinstance(last, Failed):
            raise dg.Failure(last.message, allow_retries=last.retryable)
        raise dg.Failure(
            f"{program} ended with status {process.returncode}; see {log_path}",
            allow_retries=(process.returncode or 0) < 0,
        )

    def _listen(
        self,
        process: Process,
        session: dg.PipesSession,
        messages: MessageFile,
        on_message: Report,
    ) -> Last | None:
        """The program's last message; None if it was killed before it sent one."""
        last: Last | None = None
        num_seen = 0
        while True:
            has_ended = process.poll() is not None
            messages.read_new()
            received = list(session.get_custom_messages())
            for message in map(parse_message, received[num_seen:]):
                if isinstance(message, Last):
                    last = message
                else:
                    on_message(message)
            num_seen = len(received)
            if has_ended:
                return last
            time.sleep(POLL_S)

    def _stop_group(self, context: dg.AssetExecutionContext, process: Process, why: str) -> None:
        if process.poll() is None:
            context.log.info(f"{why}: asking process {process.pid} to stop")
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                context.log.warning(f"process {process.pid} did not stop in {self.grace_s:.0f} s: killing its group")
        self._kill_group(process)

    def _kill_group(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(program: str, num_processes: int, scratch: Path) -> list[str]:
    if num_processes == 1:
        return [sys.executable, "-m", "osworld_pipeline.runs", program]
    ranks = [program, str(num_processes), str(os.getpid()), str(scratch)]
    return [sys.executable, "-m", "osworld_pipeline.runs.launch.ranks", *ranks]


def _start(
    command: Sequence[str], job: Mapping[str, Any], *, output: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with _job_file(job, os.getpid()) as stdin:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},  # passed on, not read
        )


@contextmanager
def _job_file(job: Mapping[str, Any], parent_pid: int) -> Iterator[int]:
    """An anonymous file, because jobs contain secrets; the ranks share it, and each reads it from the beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps({**job, "parent_pid": parent_pid}).encode())
        file.flush()
        yield file.fileno()


@contextmanager
def _open_session(context: dg.AssetExecutionContext, messages: MessageFile) -> Iterator[dg.PipesSession]:
    with warnings.catch_warnings():
        # Dagster warns about a preview feature that is not used here.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        session = dg.open_pipes_session(
            context=context,
            context_injector=dg.PipesEnvContextInjector(),
            message_reader=messages,
        )
        opened = session.__enter__()
    try:
        yield opened
    finally:
        session.__exit__(None, None, None)
