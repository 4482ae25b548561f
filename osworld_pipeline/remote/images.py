"""Images of pushed parts that are single files: uploaded once, before the parts that name them. Packed images are
uploaded with their packs.

A journal next to the state records which are uploaded. It only saves time: without it each image is looked up again.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket
from osworld_pipeline.object_store.note import FOLDER
from osworld_pipeline.progress import OnProgress, Tally
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.garbage import images_of

NUM_THREADS = 8
FILES_AT_ONCE = 16
"""Number of files whose image hashes are in memory at once."""
JOURNAL = "pushed-"
"""Start of the name of the journal's folder; RemoteManifest.journal follows."""
_DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class ImageSummary:
    num_uploaded: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    """Named by rows, but missing here and on the object store."""


def push_images(
    state: StateDir,
    bucket: Bucket,
    files: Sequence[str],
    packs: Set[str],
    *,
    journal: str,
    on_progress: OnProgress | None = None,
) -> ImageSummary:
    """Uploads the images that the rows of these files name and that are in none of `packs`.

    Raises:
        FileNotFoundError: an image went into another pack meanwhile.
        StoreError: the object store or the file system refused.
    """
    done = ImageSummary()
    known = _Journal(state.root / FOLDER / f"{JOURNAL}{journal}")
    known.remove_others()
    for first in range(0, len(files), FILES_AT_ONCE):
        some = files[first : first + FILES_AT_ONCE]
        what = f"sending images of files {first + 1}-{first + len(some)} of {len(files)}"
        images = {digest for path in some for digest in _images_of(state.root / path)}
        done = _plus(done, _push(state, bucket, known, images, packs, Tally(on_progress, what, len(images), "images")))
    return done


def _push(
    state: StateDir, bucket: Bucket, journal: "_Journal", images: Set[bytes], packs: Set[str], looked_at: Tally
) -> ImageSummary:
    done = ImageSummary()
    blobs = BlobStore(state.blobs)
    by_folder: dict[str, set[bytes]] = defaultdict(set)
    for digest in images:
        by_folder[digest.hex()[:2]].add(digest)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="push") as pool:
        for folder, digests in sorted(by_folder.items()):
            # Not recorded in the journal: a pack may be removed and its image become a file again.
            new = sorted(one for one in digests - journal.read(folder) if not _is_packed(blobs, one.hex(), packs))
            looked_at.add(len(digests) - len(new))
            sizes: list[int | None] = []
            for size in pool.map(lambda digest: _upload(blobs, bucket, digest.hex()), new):
                sizes.append(size)
                looked_at.add(1)
            journal.add(folder, [digest for digest, size in zip(new, sizes, strict=True) if size is not None])
            uploaded = [size for size in sizes if size]
            done = _plus(done, ImageSummary(
                num_uploaded=len(uploaded), num_bytes=sum(uploaded), num_missing=sizes.count(None)
            ))  # fmt: skip
    return done


def _upload(blobs: BlobStore, bucket: Bucket, sha256: str) -> int | None:
    """Bytes sent; None if there is no such image."""
    path = blobs.find_file(sha256)
    if path is None:
        if blobs.packs.find(sha256) is not None:
            raise FileNotFoundError(sha256)
        return None
    try:
        with path.open("rb") as file:
            return bucket.upload(file, f"{blobs.root.name}/{sha256[:2]}/{path.name}")
    except FileNotFoundError:
        if blobs.packs.find(sha256) is not None:
            raise
        return None


def _is_packed(blobs: BlobStore, sha256: str, packs: Set[str]) -> bool:
    return any(entry.pack in packs for entry in blobs.packs.entries(sha256))


def replace_journal(state: StateDir, old: str, new: str, removed: Set[bytes]) -> None:
    """Creates the journal `new` from `old`, without the `removed` images. After a kill in between, later pushes need
    one request per image."""
    before, after = (_Journal(state.root / FOLDER / f"{JOURNAL}{name}") for name in (old, new))
    for name in before.names():
        after.add(name, sorted(before.read(name) - removed))
    after.remove_others()


class _Journal:
    """SHA-256 of images that the object store has, 32 bytes each, in 256 files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> set[bytes]:
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return set()
        whole = len(data) - len(data) % _DIGEST_BYTES  # a killed writer may leave a partial record
        return {data[start : start + _DIGEST_BYTES] for start in range(0, whole, _DIGEST_BYTES)}

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def remove_others(self) -> None:
        """Removes journals of earlier collections, and of a state that the object store no longer has."""
        for folder in self._folder.parent.glob(f"{JOURNAL}*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: str, digests: list[bytes]) -> None:
        if not digests:
            return
        path = self._folder / name
        with path.open("ab") as file:
            file.truncate(file.tell() - file.tell() % _DIGEST_BYTES)
            file.write(b"".join(digests))
            file.flush()
            os.fsync(file.fileno())


def _images_of(path: Path) -> Iterator[bytes]:
    if path.suffix != ".parquet":
        return
    try:
        for hashes in images_of(path):
            yield from (bytes.fromhex(sha256) for sha256 in hashes if len(sha256) == 2 * _DIGEST_BYTES)
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}): restore or remove it, then push again") from error


def _plus(one: ImageSummary, other: ImageSummary) -> ImageSummary:
    return ImageSummary(
        num_uploaded=one.num_uploaded + other.num_uploaded,
        num_bytes=one.num_bytes + other.num_bytes,
        num_missing=one.num_missing + other.num_missing,
    )
