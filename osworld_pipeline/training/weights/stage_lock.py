"""One trainer per stage: a lock that the kernel releases when its holder dies. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TrainingError

WAIT_S = 5.0
"""A trainer that was just stopped may need a moment to end."""


@contextmanager
def stage_lock(state: StateDir, checkpoint_id: str, *, timeout_s: float = WAIT_S) -> Iterator[None]:
    """Held while a stage is being trained.

    Raises:
        TrainingError: another process trains this stage; names its pid.
    """
    lock = state.checkpoints / f".{checkpoint_id}.lock"
    with locked(lock, timeout_s=timeout_s, error=TrainingError, what=f"training of {checkpoint_id}"):
        yield
