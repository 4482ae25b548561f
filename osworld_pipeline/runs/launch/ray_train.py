"""The ranks of one program as workers of a Ray TorchTrainer, on one or more nodes. Each runs the program's `main` with
torchrun's variables set; the program opens the process group, as under torchrun."""

import os
from collections.abc import Mapping
from typing import Any

from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.__main__ import EXIT_FATAL, EXIT_RETRYABLE, run_program
from osworld_pipeline.runs.launch.mailbox import Mailbox, MessageWriter, mailbox_folder
from osworld_pipeline.runs.launch.queued_job import QueuedRun
from osworld_pipeline.runs.messages import Failed, Message, Started
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.shared_state import SharedState, job_here


class RankFailedError(Exception):
    """How a rank failed, sent to the driver. It is pickled by its arguments, so it holds nothing else."""

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message, retryable)
        self.message = message
        self.retryable = retryable


def train(run: QueuedRun) -> int:
    """Runs the program as several ranks to its end; returns the exit status. Rank 0 reports; if a rank fails, the
    last message is that of `explain_failure`. This process must be connected to Ray."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    rank = RayShare.model_validate(run.job.get("ray") or {}).rank
    trainer = TorchTrainer(
        run_rank,
        # By reference: Ray shows the configuration to its users, but not the job.
        train_loop_config={
            "program": run.program,
            "job": ray.put(dict(run.job)),
            "mailbox": run.mailbox.name,
            "state": SharedState.of(run.state).to_text(),
        },
        torch_config=torchrun_config(),
        scaling_config=ScalingConfig(
            num_workers=run.num_ranks, use_gpu=rank.gpus > 0, resources_per_worker=rank.bundle()
        ),
        run_config=RunConfig(
            name="ranks",
            storage_path=str(run.mailbox.folder.resolve()),  # else Ray creates a folder in the home folder
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    try:
        trainer.fit()
        return 0
    except TrainingFailedError as error:
        message = explain_failure(run.program, run.num_ranks, error)
        MessageWriter(run.mailbox).report(message)
        return EXIT_RETRYABLE if message.retryable else EXIT_FATAL


def run_rank(config: Mapping[str, Any]) -> None:
    """The main function of a worker. Raises RankFailedError."""
    import ray

    try:
        state = SharedState.from_text(config["state"]).here()
    except StoreError as error:
        raise RankFailedError(str(error), error.is_retryable) from error
    job = job_here(ray.get(config["job"]), state)
    failures: list[Failed] = []
    is_main = os.environ["RANK"] == "0"
    writer = MessageWriter(Mailbox(mailbox_folder(state, config["mailbox"]))) if is_main else None
    if writer is not None:
        writer.report(Started())

    def report(message: Message) -> None:
        if isinstance(message, Failed):
            failures.append(message)
        if writer is not None:
            writer.report(message)

    if run_program(config["program"], job, report) != 0:
        raise RankFailedError(failures[-1].message, failures[-1].retryable)


def torchrun_config() -> Any:
    """A TorchConfig that sets the variables and leaves the process group to the program.

    The classes are defined here because they derive from Ray's, which is imported lazily.
    """
    from ray.train import get_context
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    def free_address() -> tuple[str, int]:
        import socket

        from osworld_pipeline.runs.rollouts.ray_calls import node_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return node_address(), listener.getsockname()[1]

    def set_variables(address: str, port: int) -> None:
        context = get_context()
        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(context.get_world_rank()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        }

    class TorchrunBackend(Backend):
        share_cuda_visible_devices = True

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            address, port = worker_group.execute_single(0, free_address)
            worker_group.execute(set_variables, address, port)

    class TorchrunConfig(TorchConfig):
        @property
        def backend_cls(self) -> Any:
            return TorchrunBackend

    return TorchrunConfig()


def explain_failure(program: str, num_ranks: int, error: Exception) -> Failed:
    """The last message of a run whose ranks failed. It names the first rank that was lost or failed without a report;
    if there is none, it is the message of the first rank that reported one."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    lost = [rank for rank, failure in sorted(failures.items()) if _reported_error(failure) is None]
    reported = [(rank, found) for rank, failure in sorted(failures.items()) if (found := _reported_error(failure))]
    if lost or not reported:
        cause = failures[lost[0]] if lost else error
        reason = str(cause).strip().splitlines()
        which = f"rank {lost[0]} of {program} ({num_ranks} ranks)" if lost else f"the ranks of {program}"
        # A bug in the program comes with a traceback, which is in the log; a lost process or node does not.
        return Failed(
            type=type(cause).__name__,
            message=f"{which} failed without a report of the program: {reason[0] if reason else type(cause).__name__}",
            retryable=_is_loss(cause),
        )
    _, first = reported[0]
    return Failed(type="RankFailedError", message=first.message, retryable=first.retryable)


def _reported_error(failure: Exception) -> RankFailedError | None:
    """The RankFailedError of a rank, even if Ray has wrapped it; None if the failure is another one."""
    for cause in (failure, getattr(failure, "_base_exc", None), getattr(failure, "cause", None), failure.__cause__):
        if isinstance(cause, RankFailedError):
            return cause
    return None


def _is_loss(failure: Exception) -> bool:
    from ray.exceptions import RayActorError

    causes = (failure, getattr(failure, "health_check_failure", None), failure.__cause__)
    return any(isinstance(cause, RayActorError) for cause in causes)
