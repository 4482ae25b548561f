"""Downloaded files on disk, named by the digest of their URL, limited in total; the least recently used are evicted.
Several servers may share a folder: a file appears by an atomic rename, and a reader whose file was evicted fetches it
again."""

import contextlib
import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DEFAULT_MAX_BYTES = 8 * 1024 * 1024 * 1024
STALE_PART_S = 3600.0
_PART = ".part-"


@dataclass(frozen=True)
class Part:
    """A download in progress."""

    path: Path
    file: BinaryIO

    def discard(self) -> None:
        """Idempotent; has no effect after `keep`."""
        with contextlib.suppress(OSError):  # buffered data of a failed write fails again at close
            self.file.close()
        self.path.unlink(missing_ok=True)


class DownloadCache:
    """Its methods do blocking file I/O: call them in a thread."""

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._is_ready = False

    def read(self, url: str) -> bytes | None:
        """The cached file of a URL, or None. Marks it as used."""
        path = self._path(url)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def begin(self) -> "Part":
        """Creates a file for a download. OSError: it cannot be created."""
        self._prepare()
        descriptor, path = tempfile.mkstemp(dir=self._folder, prefix=_PART)
        return Part(Path(path), os.fdopen(descriptor, "wb"))

    def keep(self, part: "Part", url: str) -> None:
        """Makes the download the cached file of the URL; may evict other files."""
        part.file.close()
        os.replace(part.path, self._path(url))
        self._evict()

    def _path(self, url: str) -> Path:
        return self._folder / hashlib.sha256(url.encode()).hexdigest()

    def _prepare(self) -> None:
        if self._is_ready:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in self._folder.glob(f"{_PART}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > STALE_PART_S:
                    part.unlink()
        self._is_ready = True

    def _evict(self) -> None:
        kept = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith(_PART):
                    status = path.stat()
                    kept.append((status.st_mtime_ns, status.st_size, path))
        total = sum(num_bytes for _, num_bytes, _ in kept)
        for _, num_bytes, path in sorted(kept, key=lambda item: item[0])[:-1]:
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= num_bytes
