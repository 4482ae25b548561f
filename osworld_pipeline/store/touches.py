"""Records packed images that a writer stored again, because a row may name them soon. A single file would be touched; a
pack cannot be. Each process appends their SHA-256 (32 bytes each) to a journal, which the garbage collection reads."""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from osworld_pipeline.atomic_io import explain_refusal
from osworld_pipeline.errors import StoreError

FOLDER = "touched"
ROTATE_S = 3600.0
"""A writer starts another journal after this time; one that was not written for twice as long may be removed."""
_DIGEST = 32


class TouchJournal:
    """The journal of one process, for any number of threads."""

    def __init__(self, blobs: Path) -> None:
        self._folder = blobs / FOLDER
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._until = 0.0

    def add(self, sha256: str) -> None:
        """Raises StoreError if the file system refused."""
        with self._lock:
            if self._path is None or time.monotonic() >= self._until:
                self._path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}.digests"
                self._until = time.monotonic() + ROTATE_S
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab", buffering=0) as file:
                    is_whole = file.write(bytes.fromhex(sha256)) == _DIGEST
            except OSError as error:
                path, self._path = self._path, None
                raise StoreError(explain_refusal(path, error)) from error
            if not is_whole:
                path, self._path = self._path, None
                raise StoreError(f"no disk space left to write {path}: free some space there and run again")


class TouchReader:
    """Reads journals that were written since `since` (Unix time), each entry once."""

    def __init__(self, blobs: Path, *, since: float) -> None:
        self._folder = blobs / FOLDER
        self._since = since
        self._read: dict[str, int] = {}

    def news(self) -> Iterator[list[str]]:
        """SHA-256 that were touched since the last call, a journal at a time. Raises StoreError."""
        for path in sorted(self._folder.glob("*.digests")):
            try:
                if path.stat().st_mtime < self._since:
                    continue
                with path.open("rb") as file:
                    file.seek(self._read.get(path.name, 0))
                    data = file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be read: {error.strerror}; fix that and run again") from error
            whole = len(data) - len(data) % _DIGEST
            self._read[path.name] = self._read.get(path.name, 0) + whole
            yield [data[start : start + _DIGEST].hex() for start in range(0, whole, _DIGEST)]


def remove_old_journals(blobs: Path, *, before: float) -> None:
    """Removes journals that were not written since `before` (Unix time) and that no process will write."""
    before = min(before, time.time() - 2 * ROTATE_S)
    for path in (blobs / FOLDER).glob("*.digests"):
        if path.stat().st_mtime < before:
            path.unlink(missing_ok=True)
