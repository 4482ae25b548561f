"""The entrypoint of a Ray job: as `queued_job`, and several ranks are workers of a TorchTrainer."""

import signal
import sys
from typing import Any

from osworld_pipeline.runs.__main__ import stop
from osworld_pipeline.runs.launch.mailbox import Mailbox
from osworld_pipeline.runs.launch.queued_job import run_alone, run_queued


def main(argv: list[str]) -> int:
    """`argv`: as `run_queued`."""
    return run_queued(argv, run_ranks)


def run_ranks(program: str, job: dict[str, Any], mailbox: Mailbox, num_ranks: int) -> int:
    """One rank runs in this process, which connects to Ray if it has rollout actors."""
    if num_ranks > 1:
        from osworld_pipeline.runs.launch.ray_train import train

        return train(program, job, mailbox, num_ranks=num_ranks)
    if job.get("ray", {}).get("num_rollout_actors"):
        import ray

        ray.init(log_to_driver=True)
        signal.signal(signal.SIGTERM, stop)  # replaces Ray's handler
    return run_alone(program, job, mailbox, num_ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
