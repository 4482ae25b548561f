"""Images by content: each is stored under the SHA-256 of its bytes, first as a single file, later in a pack (see
packs.py)."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from osworld_pipeline.atomic_io import locked, remove_stale_temps, write_file
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket, open_bucket, read_note
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.pack_files import NAME_BYTES, SUFFIXES, name_before
from osworld_pipeline.store.packs import open_packs
from osworld_pipeline.store.touches import TouchJournal

log = logging.getLogger(__name__)
T = TypeVar("T")
INCOMING = "incoming"
"""Blobs are written here first, so that the files of killed writers are found without reading 256 folders."""
LOCK = "collect.lock"
LOCK_TIMEOUT_S = 30.0
NUM_THREADS = 16
"""Threads for one batch: a disk syncs many files in parallel nearly as fast as one."""
BATCH = 256
NUM_LOOKS = 4
"""Attempts to find an image in its file or in packs. A cache fetches a missing image after the second attempt."""


class BlobStore:
    """`root/ab/ab12...ef.png`, or a member of `root/packs/*.zip`; any number of writers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packs = open_packs(root)
        self._touched = TouchJournal(root)

    def write(self, data: bytes, *, suffix: str) -> str:
        """Stores `data` unless it exists; returns its SHA-256. Garbage collection then keeps it for the grace period.
        Raises StoreError."""
        sha256 = digest_bytes(data)
        path = self.path(sha256, suffix=suffix)
        if not (path.is_file() and self._touch(path)) and not self._touch_packed(sha256):
            write_file(path, data, temp_folder=self.root / INCOMING)
        return sha256

    def write_many(self, images: Sequence[tuple[bytes, str]]) -> list[str]:
        """Does the same as `write` for each (data, suffix), several in parallel. Raises StoreError."""
        with ThreadPoolExecutor(min(NUM_THREADS, max(1, len(images))), thread_name_prefix="blobs") as pool:
            return list(pool.map(lambda image: self.write(image[0], suffix=image[1]), images))

    def _touch(self, path: Path) -> bool:
        """Updates the time of an image; False if it was just collected."""
        with self.locked(is_shared=True):
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise StoreError(f"cannot touch {path}: {error.strerror}; make it writable for this user") from error
            return True

    def _touch_packed(self, sha256: str) -> bool:
        """Records that a packed image was stored again; False if no pack has it."""
        try:
            if self.packs.find(sha256) is None:
                return False
            with self.locked(is_shared=True):
                if self.packs.find(sha256) is None:
                    return False  # just collected
                self._touched.add(sha256)
                return True
        except StoreError as error:
            log.warning("image %s is stored as a single file, although a pack may have it: %s", sha256, error)
            return False  # readers raise this error; a writer must not fail

    def locked(self, *, is_shared: bool) -> AbstractContextManager[None]:
        """Exclusive while images are removed; shared while an existing one is touched. Raises StoreError."""
        return locked(
            self.root / LOCK, timeout_s=LOCK_TIMEOUT_S, error=StoreError, what="the image store", is_shared=is_shared
        )

    def list(
        self, on_progress: OnProgress | None = None, what: str = "listing images"
    ) -> Iterator[tuple[str, Path, os.stat_result]]:
        """SHA-256, path and stat of all image files, in no order; files removed meanwhile are skipped."""
        folders = sorted(self.root.glob("[0-9a-f][0-9a-f]"))
        for folder in tracked(folders, on_progress, what, "folders"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    name, _, suffix = entry.name.partition(".")
                    if suffix in SUFFIXES:
                        with suppress(FileNotFoundError):
                            yield name, Path(entry.path), entry.stat()

    def remove_unused(self, paths: Iterable[Path], *, before: float) -> tuple[int, int]:
        """Removes those of `paths` that were not written or touched since `before` (Unix time); returns their number
        and bytes. A writer waits for 256 removals at most."""
        num_removed = num_bytes = 0
        waiting = list(paths)
        for start in range(0, len(waiting), BATCH):
            with self.locked(is_shared=False):
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

    def find_file(self, sha256: str) -> Path | None:
        """The image's own file, in any format; None if it has none."""
        paths = (self.path(sha256, suffix=suffix) for suffix in SUFFIXES)
        return next((path for path in paths if path.is_file()), None)

    def size(self, sha256: str) -> int:
        """The size in bytes. Raises StoreError as `read`."""

        def look() -> int | None:
            path = self.find_file(sha256)
            entry = None if path else self.packs.find(sha256)
            return path.stat().st_size if path else entry and entry.num_bytes

        return self._found(sha256, look)

    def read(self, sha256: str) -> bytes:
        """An image from its file or pack; a cache of an object store fetches missing ones.

        Raises:
            StoreError: there is none, its pack is damaged, or the object store cannot be reached.
        """

        def look() -> bytes | None:
            path = self.find_file(sha256)
            return path.read_bytes() if path else self.packs.read(sha256)

        return self._found(sha256, look)

    def place(self, sha256: str) -> str | None:
        """The location of an image below the store's folder: its file, or its pack and the name in it; None if there is
        no such image. Raises StoreError."""
        path = self.find_file(sha256)
        if path is not None:
            return path.relative_to(self.root).as_posix()
        member = self.packs.member(sha256)
        return None if member is None else f"{self.packs.root.name}/{member}"

    def _found(self, sha256: str, look: Callable[[], T | None]) -> T:
        # Packing moves an image from its file to a pack, and a writer may create a file again.
        for number in range(NUM_LOOKS):
            with suppress(FileNotFoundError):
                found = look()
                if found is not None:
                    return found
            if number == 1 and not self._fetch(sha256):
                break
        self.packs.check()
        raise StoreError(
            f"image {sha256} is not in {self.root}: rebuild what refers to it, or restore the folder from a copy"
        )

    def _fetch(self, sha256: str) -> bool:
        """Fetches an image into a cache of an object store; False if the object store has none."""
        note = read_note(self.root.parent)
        if note is None or note.role != "cache":
            return False
        bucket = open_bucket(note.url)
        if self._fetch_packed(bucket, sha256):
            return True
        for suffix in SUFFIXES:
            path = self.path(sha256, suffix=suffix)
            if bucket.download(f"{self.root.name}/{sha256[:2]}/{path.name}", path, sha256=sha256):
                return True
        return False

    def _fetch_packed(self, bucket: Bucket, sha256: str) -> bool:
        """Downloads one image from a pack of the object store and writes it as a single file; False if no pack has it.
        Its file name precedes it in the pack."""
        for entry in self.packs.entries(sha256):
            key = f"{self.root.name}/{self.packs.root.name}/{entry.pack}"
            found = bucket.read_range(key, entry.offset - NAME_BYTES, NAME_BYTES + entry.num_bytes)
            if found is None:
                continue
            name, data = name_before(found[:NAME_BYTES], sha256), found[NAME_BYTES:]
            if name is None or digest_bytes(data) != sha256:
                raise StoreError(f"{bucket.url}/{key} is damaged ({sha256} has other bytes): push it from its origin")
            write_file(self.root / sha256[:2] / name, data, temp_folder=self.root / INCOMING)
            return True
        return False

    def remove_stale_temps(self) -> int:
        return remove_stale_temps(self.root / INCOMING)
