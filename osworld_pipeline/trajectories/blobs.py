"""Images by content: each is stored once, under the SHA-256 of its exact bytes."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.durable import locked, remove_stale_temps, write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import open_bucket, read_note

SUFFIXES = ("png", "jpeg", "jpg", "webp")
INCOMING = "incoming"
"""Blobs are written here first, so that what killed writers left is found without reading 256 folders."""
LOCK = "collect.lock"
LOCK_TIMEOUT_S = 30.0
NUM_THREADS = 16
"""Writers of one batch: a disk syncs many files at once nearly as fast as one."""
BATCH = 256


class BlobStore:
    """`root/ab/ab12...ef.png`; any number of writers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, data: bytes, *, suffix: str) -> str:
        """Stores `data` unless it is there; returns its SHA-256. From here on it is safe from garbage collection for
        the grace period. Raises StoreError."""
        sha256 = digest_bytes(data)
        path = self.path(sha256, suffix=suffix)
        if not (path.is_file() and self._touch(path)):
            write_file(path, data, temp_folder=self.root / INCOMING)
        return sha256

    def write_many(self, images: Sequence[tuple[bytes, str]]) -> list[str]:
        """As `write` for each (data, suffix), several at a time. Raises StoreError."""
        with ThreadPoolExecutor(min(NUM_THREADS, max(1, len(images))), thread_name_prefix="blobs") as pool:
            return list(pool.map(lambda image: self.write(image[0], suffix=image[1]), images))

    def _touch(self, path: Path) -> bool:
        """Makes an image as good as new; False where it was collected just now."""
        with self._locked(is_shared=True):
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise StoreError(f"cannot touch {path}: {error.strerror}; make it writable for this user") from error
            return True

    def _locked(self, *, is_shared: bool) -> AbstractContextManager[None]:
        return locked(
            self.root / LOCK, timeout_s=LOCK_TIMEOUT_S, error=StoreError, what="the image store", is_shared=is_shared
        )

    def list(self) -> Iterator[tuple[str, Path, os.stat_result]]:
        """SHA-256, file and its state of all images, in no order; one that goes meanwhile is left out."""
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            with os.scandir(folder) as entries:
                for entry in entries:
                    name, _, suffix = entry.name.partition(".")
                    if suffix in SUFFIXES:
                        with suppress(FileNotFoundError):
                            yield name, Path(entry.path), entry.stat()

    def remove_unused(self, paths: Iterable[Path], *, before: float) -> tuple[int, int]:
        """Removes those of `paths` that nobody has written or touched since `before` (Unix time); returns how many, and
        their bytes. A writer waits for 256 of them at most."""
        num_removed = num_bytes = 0
        waiting = list(paths)
        for start in range(0, len(waiting), BATCH):
            with self._locked(is_shared=False):
                for path in waiting[start : start + BATCH]:
                    with suppress(FileNotFoundError):
                        found = path.stat()
                        if found.st_mtime < before:
                            path.unlink()
                            num_removed += 1
                            num_bytes += found.st_size
        return num_removed, num_bytes

    def path(self, sha256: str, *, suffix: str) -> Path:
        suffix = suffix.lstrip(".").lower()
        if suffix not in SUFFIXES:
            raise StoreError(f"image blobs are {', '.join(SUFFIXES)}, not '{suffix}'")
        return self.root / sha256[:2] / f"{sha256}.{suffix}"

    def find_here(self, sha256: str) -> Path | None:
        """The file of a blob, whatever its format; None where there is none in this folder."""
        paths = (self.path(sha256, suffix=suffix) for suffix in SUFFIXES)
        return next((path for path in paths if path.is_file()), None)

    def find(self, sha256: str) -> Path:
        """The file of a blob, whatever its format; a cache of an object store fetches it from there.

        Raises:
            StoreError: there is none, or the object store cannot be reached.
        """
        found = self.find_here(sha256) or self._fetched(sha256)
        if found is not None:
            return found
        raise StoreError(
            f"image {sha256} is not in {self.root}: rebuild what refers to it, or restore the folder from a copy"
        )

    def _fetched(self, sha256: str) -> Path | None:
        note = read_note(self.root.parent)
        if note is None or note.role != "cache":
            return None
        bucket = open_bucket(note.url)
        for suffix in SUFFIXES:
            path = self.path(sha256, suffix=suffix)
            if bucket.download(f"{self.root.name}/{sha256[:2]}/{path.name}", path, sha256=sha256):
                return path
        return None

    def read(self, sha256: str) -> bytes:
        return self.find(sha256).read_bytes()

    def remove_stale_temps(self) -> int:
        return remove_stale_temps(self.root / INCOMING)
