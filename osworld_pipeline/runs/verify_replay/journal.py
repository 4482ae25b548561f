"""Finished playbacks on their way into the store: each is on the disk before the next begins, and the store gets few
parts. A journal that a killed run left is brought in by the next one."""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.replay import ReplayVerification
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import TrajectoryStore

FOLDER = "verifying"
"""In the trajectories' folder: one journal for each run at work."""
ROWS_PER_PART = 64


class VerificationJournal:
    """For one thread at a time. Entering it brings in what killed runs left; leaving it empties it into the store."""

    def __init__(self, state: StateDir) -> None:
        self._store = TrajectoryStore(state)
        self._folder = state.trajectories / FOLDER
        self._path = self._folder / f"{uuid4().hex}.jsonl"
        self._rows: list[ReplayVerification] = []

    def __enter__(self) -> Self:
        """Raises StoreError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in sorted(self._folder.glob("*.jsonl")):
                self._bring_in(left)
            self._file = self._path.open("a")
            # Whoever finds this file unlocked knows that its run is dead.
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"cannot keep a journal in {self._folder} ({error}): make it writable") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
            self._path.unlink(missing_ok=True)
        finally:
            self._file.close()

    def write(self, verifications: Sequence[ReplayVerification]) -> None:
        """They are on the disk when this returns. Raises StoreError."""
        try:
            self._file.writelines(json.dumps(asdict(one)) + "\n" for one in verifications)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"cannot write {self._path} ({error}): free some space and run again") from error
        self._rows += verifications
        if len(self._rows) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """What was written is in the store when this returns. Raises StoreError."""
        if self._rows:
            _write_part(self._store, self._rows)
            self._file.truncate(0)
            self._rows = []

    def _bring_in(self, path: Path) -> None:
        try:
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rows = [row for line in file if (row := _row_of(line)) is not None]
                if rows:
                    _write_part(self._store, rows)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            return  # its run lives, or another one was faster


def _write_part(store: TrajectoryStore, rows: Sequence[ReplayVerification]) -> None:
    """Named after what is in it: a part that was written before its journal was emptied is replaced by itself."""
    ids = "\n".join(row.verification_id for row in rows)
    store.write_verifications(f"verify-{hashlib.sha256(ids.encode()).hexdigest()[:24]}", rows)


def _row_of(line: str) -> ReplayVerification | None:
    """None for the last line of a run that was killed while it wrote it."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return ReplayVerification(**{**fields, "outcome": Outcome(fields["outcome"])})
