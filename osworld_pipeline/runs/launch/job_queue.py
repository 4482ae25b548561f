"""The service that runs programs as jobs on other machines, as a launcher sees it: Ray's Jobs, Slurm."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    status: str
    """The status in the words of the queue."""
    message: str
    """Its explanation, in one line."""
    has_ended: bool


class JobQueue(Protocol):
    """Every method raises EnvServerError if the queue does not answer, or refuses."""

    place: str
    """Name in messages, such as "the Ray at http://head:8265"."""

    def submit(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Runs `python -m module arguments...` on any machine that shares the state folder. All users of a queue may
        see the arguments: they hold no secret."""
        ...

    def status(self, name: str) -> JobStatus:
        """Status of a submitted job; it has ended if the queue does not know it any more."""
        ...

    def stop(self, name: str, *, timeout_s: float) -> bool:
        """Kills the job if it has not ended. Returns whether it ended within `timeout_s`."""
        ...

    def why_waiting(self) -> str:
        """What to check if a job does not start."""
        ...


def wait_for_end(queue: JobQueue, name: str, *, timeout_s: float) -> bool:
    """Returns whether the job ended within `timeout_s`. Raises EnvServerError."""
    deadline = time.monotonic() + timeout_s
    while not queue.status(name).has_ended:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
