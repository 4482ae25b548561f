"""The training record of a stage, written while it trains: its starts, and a row for each update.

It is written to the trajectory store with the checkpoints, independently of MLflow. A resumed program removes the
updates after its checkpoint, which it repeats; rows of many fast updates are written together.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from osworld_pipeline.domain.stage_record import AttemptStatus, StageAttempt, TrainingStage, UpdateRecord
from osworld_pipeline.errors import StoreError

if TYPE_CHECKING:
    from osworld_pipeline.store import TrajectoryStore

FAST_UPDATES_S = 5.0
"""Minimum time between two writes: the rows of updates that are faster are gathered and written together."""


class StageLog:
    """The log of one attempt at a stage; open it with `stage_log`. Blocks while it writes."""

    def __init__(self, store: "TrajectoryStore", attempt: StageAttempt, *, gather_s: float) -> None:
        self._store = store
        self._attempt = attempt
        self._gather_s = gather_s
        self._waiting: list[UpdateRecord] = []
        self._written_at = -gather_s
        self._stopped = ""

    def add(self, update: int, metrics: Mapping[str, float], *, started_at: float) -> None:
        """Adds update `update` (from 1), which began at `started_at` (Unix time) and ends now; replaces what was
        written for it before. Raises StoreError."""
        self._waiting.append(
            UpdateRecord(
                stage=self._attempt.stage,
                update=update,
                metrics=dict(metrics),
                started_at=started_at,
                ended_at=time.time(),
            )
        )
        if time.monotonic() - self._written_at >= self._gather_s:
            self.flush()

    def flush(self) -> None:
        """Writes pending rows. Call it before a checkpoint is saved, so that no part spans a checkpoint. Raises
        StoreError."""
        if self._waiting:
            self._store.write_updates(_part(self._attempt.stage, self._waiting[0].update), self._waiting)
            self._waiting = []
        self._written_at = time.monotonic()

    def stop(self, reason: str) -> None:
        """Records that the stage stops here and can be resumed; an empty `reason` records nothing."""
        self._stopped = reason

    def take_back(self, num_updates: int) -> None:
        """Removes the rows of an earlier attempt for the updates after `num_updates`. Raises StoreError."""
        prefix = _part(self._attempt.stage, None)
        for part in self._store.existing_parts("updates", prefix=prefix):
            number = part.removeprefix(prefix)
            if number.isdecimal() and int(number) > num_updates:
                self._store.write_updates(part, [])

    def begin(self) -> None:
        self._store.write_attempt(self._attempt)

    def end(self, error: BaseException | None) -> None:
        self.flush()
        status = AttemptStatus.STOPPED if self._stopped else AttemptStatus.FINISHED
        text = self._stopped or None
        if isinstance(error, Exception):
            status, text = AttemptStatus.FAILED, f"{type(error).__name__}: {error}"
        elif error is not None:
            status, text = AttemptStatus.STOPPED, "it received a signal to stop"
        self._store.write_attempt(replace(self._attempt, status=status, error=text, ended_at=time.time()))


@contextmanager
def stage_log(
    store: "TrajectoryStore", stage: TrainingStage, *, num_updates: int, gather_s: float = 0.0
) -> Iterator[StageLog]:
    """`num_updates`: how many are done. `gather_s`: minimum time between writes; rows wait for the next write.

    Raises:
        StoreError: the file system refused.
    """
    started_at = time.time()
    attempt = StageAttempt(
        attempt_id=f"{stage.stage_key}-{int(started_at * 1000):x}-{os.getpid()}",
        stage=stage,
        first_update=num_updates + 1,
        host=socket.gethostname(),
        process_id=os.getpid(),
        started_at=started_at,
    )
    log = StageLog(store, attempt, gather_s=gather_s)
    log.take_back(num_updates)
    log.begin()
    try:
        yield log
    except BaseException as error:
        with suppress(StoreError):  # it would hide the error that ended the stage
            log.end(error)
        raise
    log.end(None)


def _part(stage: TrainingStage, first_update: int | None) -> str:
    """The name of a part; with None, the common prefix of the stage's parts."""
    return f"{stage.stage_key}-u" + ("" if first_update is None else f"{first_update:06d}")
