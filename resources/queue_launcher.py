"""Runs a program of `osworld_pipeline.runs` as a job of a queue and receives its messages through a mailbox in the
state folder, which all machines of the queue share.

If the step ends early, the job receives a request to stop and is stopped after a grace period. It also exits if its
launcher sends no heartbeat for a while. A cancelled step is not retried; a lost job may be.
"""

import contextlib
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import dagster as dg
from dagster import DagsterExecutionInterruptedError
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError, PipelineError
from osworld_pipeline.runs.launch.job_queue import POLL_S, JobQueue, wait_for_end
from osworld_pipeline.runs.launch.mailbox import (
    Mailbox,
    MessageReader,
    open_mailbox,
    orphaned_mailboxes,
    remove_orphan,
)
from osworld_pipeline.runs.launch.queued_job import job_arguments
from osworld_pipeline.runs.messages import Last, Report, Result, Started, Waiting
from osworld_pipeline.runs.placement import Placement, RayDesktops
from resources.program_launcher import ProgramLauncher

QUEUED_JOB = "osworld_pipeline.runs.launch.queued_job"
STATUS_EVERY_S = 2.0
STOP_TIMEOUT_S = 30.0
LAST_WORDS_S = 2.0
"""A shared file system may show the last message only after the queue reports the end of the job."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program that is about to be submitted."""

    name: str
    """Name of its job and its mailbox."""
    program: str
    placement: Placement
    num_processes: int
    desktops: RayDesktops | None
    """The desktops that the job starts; None if it starts none."""
    run_id: str
    """Id of the Dagster run."""
    state: StateDir


class QueueLauncher(ProgramLauncher):
    """Programs as jobs of a queue whose machines share the state folder and have this package installed."""

    runs_several_ranks: ClassVar[bool] = False
    """Whether the module `job_module` can start several ranks."""
    grace_s: float = Field(
        default=20.0, description="Seconds between the request to stop and the stop; longer than saving a checkpoint."
    )
    start_timeout_s: float = Field(
        default=600.0, description="Seconds a program may wait for machines, CPUs and GPUs before it fails."
    )
    lost_after_s: float = Field(
        default=60.0, description="Seconds without a heartbeat after which job and launcher treat each other as lost."
    )

    @abstractmethod
    def open_queue(self, request: Request) -> AbstractContextManager[JobQueue]:
        """The queue for one program. Raises PipelineError: it cannot be reached, or cannot run this program."""

    def job_module(self) -> str:
        """The module that the job runs."""
        return QUEUED_JOB

    def job_additions(self) -> Mapping[str, Any]:
        """Values that are added to the program's job."""
        return {}

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
        """See Launcher.launch."""
        if num_processes > 1 and not self.runs_several_ranks:
            raise dg.Failure(
                f"trainer.num_processes is {num_processes}, and this launcher runs one rank: set it to 1, or use the "
                "launchers local or ray",
                allow_retries=False,
            )
        state.logs.mkdir(parents=True, exist_ok=True)
        log_path = state.program_log(program)
        request = Request(
            name=f"{program}-{uuid4().hex[:12]}",
            program=program,
            placement=placement,
            num_processes=num_processes,
            desktops=RayDesktops.of_job(job),
            run_id=context.run.run_id,
            state=state,
        )
        last: Last | None = None
        try:
            with self.open_queue(request) as queue, open_mailbox(state, request.name) as mailbox:
                _stop_orphans(context, state, queue)
                mailbox.put_job({**job, **self.job_additions()})
                mailbox.beat()
                run = _Run(self, context, queue, mailbox, program, on_message)
                arguments = job_arguments(
                    state, mailbox, program, num_ranks=num_processes, lost_after_s=self.lost_after_s
                )
                try:
                    queue.submit(request.name, self.job_module(), arguments)
                    context.log.info(f"{program} is the job {request.name} of {queue.place} and writes to {log_path}")
                    lost = run.listen()
                    last = run.last
                except BaseException as error:
                    run.stop(type(error).__name__)
                    raise
        except DagsterExecutionInterruptedError as error:
            raise dg.Failure(f"{program} was cancelled", allow_retries=False) from error
        except PipelineError as error:
            raise dg.Failure(str(error), allow_retries=isinstance(error, EnvServerError)) from error
        if isinstance(last, Result):
            return last.result
        if last is not None:
            raise dg.Failure(last.message, allow_retries=last.retryable)
        raise dg.Failure(f"{lost}; see {log_path}", allow_retries=True)


@dataclass
class _Run:
    """A submitted job, as its launcher sees it."""

    settings: QueueLauncher
    context: dg.AssetExecutionContext
    queue: JobQueue
    mailbox: Mailbox
    program: str
    on_message: Report
    last: Last | None = None
    has_started: bool = False
    """Whether its process runs."""
    waits_since: float | None = None
    """Start of the program's wait for resources, by the monotonic clock; None if it does not wait, or limits the wait
    itself."""
    waits_for: str = ""
    """What its process waits for; empty before it runs."""
    reader: MessageReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = MessageReader(mailbox=self.mailbox)

    def listen(self) -> str:
        """Receives messages until the job has ended; returns the queue's description of the end. Raises EnvServerError
        if it does not start, or the queue is lost."""
        last_answer, next_status = time.monotonic(), 0.0
        self.waits_since = time.monotonic()
        while True:
            self._receive()
            now = time.monotonic()
            if now >= next_status:
                self.mailbox.beat()
                next_status = now + STATUS_EVERY_S
                try:
                    status = self.queue.status(self.mailbox.name)
                    last_answer = now
                    if status.has_ended:
                        return self._stderr_tail(f"{self.program} ended as {status.status}: {status.message}")
                except EnvServerError:
                    if now - last_answer > self.settings.lost_after_s:
                        raise
            if self.waits_since is not None and now - self.waits_since > self.settings.start_timeout_s:
                why = (
                    f"check that the cluster has {self.waits_for} free" if self.waits_for else self.queue.why_waiting()
                )
                raise EnvServerError(f"{self.program} did not start within {self.settings.start_timeout_s:g} s: {why}")
            time.sleep(POLL_S)

    def stop(self, why: str) -> None:
        """Requests a stop, waits for the grace period, then stops the job; one that has not started is stopped at once.
        Logs if the job may still run. Does not raise PipelineError."""
        name = self.mailbox.name
        try:
            if self.queue.status(name).has_ended:
                return
            if self.has_started:
                self.context.log.info(f"{why}: asking the job {name} to stop")
                self.mailbox.ask_to_stop()
                if wait_for_end(self.queue, name, timeout_s=self.settings.grace_s):
                    return
                self.context.log.warning(f"the job {name} did not stop in {self.settings.grace_s:.0f} s: killing it")
            limit_s = STOP_TIMEOUT_S if self.has_started else STATUS_EVERY_S
            if self.queue.stop(name, timeout_s=limit_s):
                return
            reason = f"it had not ended {limit_s:.0f} s later"
        except PipelineError as error:
            reason = str(error)
        self.context.log.error(
            f"the job {name} may still be running ({reason}); without its launcher it exits when it starts, or "
            f"within {self.settings.lost_after_s:.0f} s"
        )

    def _stderr_tail(self, ending: str) -> str:
        deadline = time.monotonic() + LAST_WORDS_S
        while self.last is None and time.monotonic() < deadline:
            self._receive()
            time.sleep(POLL_S)
        self._receive()
        return ending

    def _receive(self) -> None:
        for message in self.reader.read():
            self.has_started, self.waits_since = True, None
            if isinstance(message, Waiting):
                self.waits_since, self.waits_for = None if message.has_limit else time.monotonic(), message.resources
                self.context.log.info(f"{self.program} waits for {message.resources}")
            elif isinstance(message, Last):
                self.last = message
            elif not isinstance(message, Started):
                self.on_message(message)


def _stop_orphans(context: dg.AssetExecutionContext, state: StateDir, queue: JobQueue) -> None:
    """Stops jobs whose launcher was killed, because they would hold resources of the next one."""
    for mailbox in orphaned_mailboxes(state):
        context.log.warning(f"The job {mailbox.name} has lost its launcher: stopping it")
        with contextlib.suppress(EnvServerError):  # then it exits without its launcher
            queue.stop(mailbox.name, timeout_s=STOP_TIMEOUT_S)
        remove_orphan(mailbox.folder)
