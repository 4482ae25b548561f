"""Runs a program of `osworld_pipeline.runs` as a Ray job and receives its messages through a mailbox in the state
folder.

If the step ends early, the job receives a request to stop and is stopped after a grace period. It also exits if its
launcher sends no heartbeat for a while. A cancelled step is not retried; a lost job may be.
"""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import dagster as dg
from dagster import DagsterExecutionInterruptedError
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError, PipelineError
from osworld_pipeline.runs.job import RayShare
from osworld_pipeline.runs.launch.local_ray import RayCluster, local_ray
from osworld_pipeline.runs.launch.mailbox import (
    Mailbox,
    MessageReader,
    mailbox_folder,
    open_mailbox,
    orphaned_mailboxes,
    remove_orphan,
)
from osworld_pipeline.runs.messages import Last, Report, Result, Started
from resources.local_launcher import PROGRAM_ENV

if TYPE_CHECKING:
    from osworld_pipeline.runs.launch.ray_jobs import RayJobs

JOB_ENV = {**PROGRAM_ENV, "RAY_TRAIN_V2_ENABLED": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
"""A Ray cluster started here has these variables for all; on an existing cluster they are sent with the job, whose
workers then start slightly slower."""
POLL_S = 0.2
STATUS_EVERY_S = 2.0
STOP_TIMEOUT_S = 30.0
LAST_WORDS_S = 2.0
"""A shared file system may show the last message only after Ray reports the end of the job."""


class RayLauncher(dg.Config):
    """Programs as jobs of a Ray cluster whose machines share the state folder and have this package installed."""

    kind: Literal["ray"] = "ray"
    address: str | None = Field(
        default=None,
        description="The dashboard's URL, such as http://head:8265; without one, each program starts a local Ray.",
    )
    token: str | None = Field(default=None, description="The cluster's authentication token; give it as an EnvVar.")
    python: str | None = Field(
        default=None, description="Python on the cluster; default: `python`, or this interpreter for a local Ray."
    )
    cpus_per_rank: float = Field(default=1.0, gt=0, description="CPUs of a training rank, as counted by Ray.")
    gpus_per_rank: float = Field(default=0.0, ge=0, description="GPUs of a training rank; 0 trains on CPUs over gloo.")
    num_rollout_actors: int = Field(
        default=0, ge=0, description="Ray actors that run the episodes of GSPO; 0 runs them in the trainer's program."
    )
    cpus_per_rollout_actor: float = Field(default=1.0, gt=0, description="CPUs of one actor.")
    gpus_per_rollout_actor: float = Field(default=0.0, ge=0, description="GPUs of one actor.")
    grace_s: float = Field(
        default=20.0, description="Seconds between the request to stop and the stop; longer than saving a checkpoint."
    )
    start_timeout_s: float = Field(
        default=600.0, description="Seconds a program may wait for machines, CPUs and GPUs before it fails."
    )
    lost_after_s: float = Field(
        default=60.0, description="Seconds without a heartbeat after which job and launcher consider each other dead."
    )

    def launch(
        self,
        context: dg.AssetExecutionContext,
        program: str,
        job: Mapping[str, Any],
        on_message: Report,
        *,
        state: StateDir,
        num_processes: int = 1,
    ) -> dict[str, Any]:
        """See Launcher.launch."""
        from osworld_pipeline.runs.launch.ray_jobs import RayJobs  # an HTTP client: not when definitions are loaded

        state.logs.mkdir(parents=True, exist_ok=True)
        log_path = state.logs / f"{program}.log"
        name = f"{program}-{uuid4().hex[:12]}"
        last: Last | None = None
        try:
            with (
                self._open_cluster(state, name, num_processes) as cluster,
                RayJobs(cluster) as jobs,
                open_mailbox(state, name) as mailbox,
            ):
                _stop_orphans(context, state, jobs)
                mailbox.put_job({**job, "ray": self._share.model_dump()})
                mailbox.beat()
                run = _Run(self, context, jobs, mailbox, program, on_message)
                arguments = [program, str(mailbox.folder), str(num_processes), str(self.lost_after_s), str(log_path)]
                try:
                    jobs.submit(
                        name,
                        shlex.join([self._python(), "-m", "osworld_pipeline.runs.launch.ray_job", *arguments]),
                        env_vars={} if self.address is None else JOB_ENV,
                        metadata={"program": program, "dagster_run_id": context.run.run_id},
                    )
                    context.log.info(f"{program} is job {name} of the Ray at {jobs.url} and writes to {log_path}")
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

    @contextmanager
    def _open_cluster(self, state: StateDir, name: str, num_processes: int) -> Iterator[RayCluster]:
        if self.address is not None:
            yield RayCluster(url=self.address, token=self.token)
            return
        # Ray's CPUs are only a count: the requested number must fit, even if this machine has fewer.
        wanted = num_processes * self.cpus_per_rank + self.num_rollout_actors * self.cpus_per_rollout_actor
        num_cpus = max(len(os.sched_getaffinity(0)), int(wanted) + 1)
        log_path, mailbox = state.logs / "ray.log", mailbox_folder(state, name)
        with local_ray(log_path, num_cpus=num_cpus, env_vars=JOB_ENV, leftover=mailbox) as cluster:
            yield cluster

    def _python(self) -> str:
        return self.python or (sys.executable if self.address is None else "python")

    @property
    def _share(self) -> RayShare:
        return RayShare.model_validate({name: getattr(self, name) for name in RayShare.model_fields})


@dataclass
class _Run:
    """A submitted job, as its launcher sees it."""

    settings: RayLauncher
    context: dg.AssetExecutionContext
    jobs: "RayJobs"
    mailbox: Mailbox
    program: str
    on_message: Report
    last: Last | None = None
    has_started: bool = False
    reader: MessageReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = MessageReader(mailbox=self.mailbox)

    def listen(self) -> str:
        """Receives messages until the job has ended; returns Ray's description of the end. Raises EnvServerError if it
        does not start, or the cluster is lost."""
        started, last_answer, next_status = time.monotonic(), time.monotonic(), 0.0
        while True:
            self._receive()
            now = time.monotonic()
            if now >= next_status:
                self.mailbox.beat()
                next_status = now + STATUS_EVERY_S
                try:
                    status = self.jobs.status(self.mailbox.name)
                    last_answer = now
                    if status.has_ended:
                        return self._stderr_tail(f"{self.program} ended as {status.status}: {status.message}")
                except EnvServerError:
                    if now - last_answer > self.settings.lost_after_s:
                        raise
            if not self.has_started and now - started > self.settings.start_timeout_s:
                raise EnvServerError(
                    f"{self.program} did not start within {self.settings.start_timeout_s:g} s: check at "
                    f"{self.jobs.url} that the cluster has the requested CPUs and GPUs"
                )
            time.sleep(POLL_S)

    def stop(self, why: str) -> None:
        """Requests a stop, waits for the grace period, then stops the job; logs if the job may still run. Does not
        raise PipelineError."""
        name = self.mailbox.name
        try:
            if self.jobs.status(name).has_ended:
                return
            self.context.log.info(f"{why}: asking Ray job {name} to stop")
            self.mailbox.ask_to_stop()
            if self.jobs.wait(name, timeout_s=self.settings.grace_s):
                return
            self.context.log.warning(f"Ray job {name} did not stop in {self.settings.grace_s:.0f} s: killing it")
            if self.jobs.stop(name, timeout_s=STOP_TIMEOUT_S):
                return
            reason = f"it still ran {STOP_TIMEOUT_S:.0f} s later"
        except PipelineError as error:
            reason = str(error)
        self.context.log.error(
            f"Ray job {name} was not confirmed to end ({reason}); without its launcher it exits within "
            f"{self.settings.lost_after_s:.0f} s"
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
            self.has_started = True
            if isinstance(message, Last):
                self.last = message
            elif not isinstance(message, Started):
                self.on_message(message)


def _stop_orphans(context: dg.AssetExecutionContext, state: StateDir, jobs: "RayJobs") -> None:
    """Stops jobs whose launcher was killed, because they would hold resources of the next one."""
    for mailbox in orphaned_mailboxes(state):
        context.log.warning(f"Ray job {mailbox.name} has lost its launcher: stopping it")
        with contextlib.suppress(EnvServerError):  # then it exits without its launcher
            jobs.stop(mailbox.name, timeout_s=STOP_TIMEOUT_S)
        remove_orphan(mailbox)
