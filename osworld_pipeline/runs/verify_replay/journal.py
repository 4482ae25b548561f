"""A journal of finished playbacks: each is on disk before its replica plays again, and the store gets few parts. The
next run imports the journal of a killed run."""

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
from osworld_pipeline.file_locks import TakenError, lock
from osworld_pipeline.store import TrajectoryStore

FOLDER = "verifying"
"""A folder in the trajectories' folder: one journal for each active run."""
ROWS_PER_PART = 64


class VerificationJournal:
    """A journal for one thread at a time. Entering it imports journals of killed runs; leaving it moves its content
    into the store."""

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
            self._lock = lock(_lock_of(self._path))
            self._file = self._path.open("a")
        except OSError as error:
            raise StoreError(f"cannot keep a journal in {self._folder} ({error}): make it writable") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
            self._path.unlink(missing_ok=True)
        finally:
            self._file.close()
            self._lock.release(remove=True)

    def write(self, verifications: Sequence[ReplayVerification]) -> None:
        """The records are on disk when this returns. Raises StoreError."""
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
        """The records are in the store when this returns. Raises StoreError."""
        if self._rows:
            _write_part(self._store, self._rows)
            self._file.truncate(0)
            self._rows = []

    def _bring_in(self, path: Path) -> None:
        try:
            held = lock(_lock_of(path))
        except TakenError:
            return  # its run is alive
        try:
            with path.open() as file:
                rows = [row for line in file if (row := _row_of(line)) is not None]
            if rows:
                _write_part(self._store, rows)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # another run was faster
        finally:
            held.release(remove=True)


def _lock_of(journal: Path) -> Path:
    """Held while its run is alive."""
    return journal.with_suffix(".lock")


def _write_part(store: TrajectoryStore, rows: Sequence[ReplayVerification]) -> None:
    """Named by content: if the part was written before its journal was emptied, the same part replaces it."""
    ids = "\n".join(row.verification_id for row in rows)
    store.write_verifications(f"verify-{hashlib.sha256(ids.encode()).hexdigest()[:24]}", rows)


def _row_of(line: str) -> ReplayVerification | None:
    """None for an incomplete last line of a killed run."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return ReplayVerification(**{**fields, "outcome": Outcome(fields["outcome"])})
