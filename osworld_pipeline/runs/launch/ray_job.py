"""The entrypoint of a Ray job: as `queued_job`; several ranks are workers of a TorchTrainer, and the desktops may be
actors."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.programs.short_process import run_process
from osworld_pipeline.runs.__main__ import EXIT_RETRYABLE, stop
from osworld_pipeline.runs.launch.mailbox import MessageWriter
from osworld_pipeline.runs.launch.queued_job import QueuedRun, run_alone, run_queued
from osworld_pipeline.runs.messages import Failed, Report, Waiting
from osworld_pipeline.runs.placement import RayDesktops, RayShare
from osworld_pipeline.runs.rollouts.ray_desktops import ray_desktops


def main(argv: list[str]) -> int:
    """`argv`: as `run_queued`."""
    return run_queued(argv, run_ranks)


def run_ranks(run: QueuedRun) -> int:
    """One rank runs in this process, which connects to Ray if it has ranks, actors or desktops there."""
    share, desktops = RayShare.model_validate(run.job.get("ray") or {}), RayDesktops.of_job(run.job)
    if run.num_ranks == 1 and not share.num_rollout_actors and desktops is None:
        return run_alone(run)
    import ray

    ray.init(log_to_driver=True)
    signal.signal(signal.SIGTERM, stop)  # replaces Ray's handler
    try:
        if desktops is None:
            return _run_connected(run)
        report = MessageWriter(run.mailbox).report
        try:
            with _desktops(run, desktops, report, limit_s=share.start_timeout_s) as with_desktops:
                if run.num_ranks > 1:
                    report(Waiting(resources=f"{share.rank} for each of {run.num_ranks} ranks"))
                return _run_connected(with_desktops)
        except EnvServerError as error:
            report(Failed(type=type(error).__name__, message=str(error), retryable=True))
            return EXIT_RETRYABLE
    finally:
        ray.shutdown()


def _run_connected(run: QueuedRun) -> int:
    if run.num_ranks == 1:
        return run_alone(run)
    from osworld_pipeline.runs.launch.ray_train import train

    return train(run)


@contextmanager
def _desktops(run: QueuedRun, desktops: RayDesktops, report: Report, *, limit_s: float) -> Iterator[QueuedRun]:
    """The run with the URLs of its desktops. Raises EnvServerError."""
    resources = f"{desktops.server(desktops.sizes[0])} for each of {len(desktops.sizes)} env servers"
    report(Waiting(resources=resources, has_limit=True))
    token = run.job["servers"].get("token")
    with ray_desktops(desktops, run.state, report, token=token, timeout_s=limit_s) as servers:
        yield replace(run, job={**run.job, "servers": asdict(servers)})


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
