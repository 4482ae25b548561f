"""Garbage collection on the object store: removes objects that neither the manifest nor a row of the state names, and
single images that are also in a pack.

While it removes objects, the manifest is closed: a push that started earlier fails at its swap, and no other can start.
A killed collection leaves it closed for at most CLOSED_S.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket, open_bucket, read_note
from osworld_pipeline.object_store.bucket import Listed
from osworld_pipeline.progress import OnProgress, counted
from osworld_pipeline.remote.images import replace_journal
from osworld_pipeline.remote.manifest import Remote, is_pack, read_remote, write_base
from osworld_pipeline.remote.push import LOCK, LOCK_TIMEOUT_S, need_known, push_known, swap
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.garbage import used_images
from osworld_pipeline.store.image_sets import absent

GRACE_S = 86_400.0
"""Objects that are younger than this are kept, because a repeated push uses the objects of a killed one."""
CLOSED_S = 600.0
"""How long the manifest is closed at a time; a collection that takes longer closes it again."""
MARGIN_S = 120.0
"""No object is removed in the last part of that time, because clocks of two machines may differ by this much."""
BATCH = 1_000
"""Objects removed per request."""
PACKS = "blobs/packs"
_IMAGE = re.compile(r"blobs/[0-9a-f]{2}/(?P<sha256>[0-9a-f]{64})\.[a-z]+")
_FILE = re.compile(r"objects/[0-9a-f]{2}/[0-9a-f]{64}|blobs/packs/[^/]+\.zip")


@dataclass(frozen=True, kw_only=True)
class RemoteGarbage:
    """The objects that were removed, or would be."""

    num_images: int = 0
    """Objects with a single image that no row names, or that is also in a pack."""
    image_bytes: int = 0
    num_files: int = 0
    """Objects that killed pushes left."""
    file_bytes: int = 0


def collect_remote_garbage(
    state: StateDir,
    url: str,
    *,
    grace_s: float = GRACE_S,
    is_dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> RemoteGarbage:
    """Pushes the state, then removes unreferenced objects older than `grace_s`; safe with concurrent training, readers
    and pushes from elsewhere. A dry run does not push, so it uses the last push.

    Raises:
        StoreError: the folder is not the origin of the state there; nothing was pushed yet; a row or an index cannot be
            read; another push or collection runs; or the object store refused.
        DependencyError: obstore is not installed.
    """
    bucket = open_bucket(url)
    note = read_note(state.root)
    if note is None or note.role != "origin" or note.url != bucket.url:
        raise StoreError(f"{state.root} is not the origin of {bucket.url}: collect its garbage in the origin folder")
    lock = state.root / LOCK
    with locked(lock, timeout_s=LOCK_TIMEOUT_S, error=StoreError, what="the copy on the object store"):
        remote = need_known(state, bucket)
        if is_dry_run:
            if remote is None:
                raise StoreError(f"nothing was pushed to {bucket.url} yet: push the state first")
            return _total(_dead(state, bucket, remote, before=time.time() - grace_s, on_progress=on_progress))
        push_known(state, bucket, remote, on_progress)
        return _collect(state, bucket, grace_s, on_progress)


def _collect(state: StateDir, bucket: Bucket, grace_s: float, on_progress: OnProgress | None) -> RemoteGarbage:
    with _closed(state, bucket) as closed:
        dead = _dead(state, bucket, closed.remote, before=time.time() - grace_s, on_progress=on_progress)
        images: set[bytes] = set()
        done = _total(_removed(bucket, closed, dead, images))
        manifest = closed.remote.manifest
        old = replace(manifest, collection=manifest.collection - 1)
        replace_journal(state, old.journal, manifest.journal, images)
    return done


def _removed(bucket: Bucket, closed: "_Closed", dead: Iterator[Listed], images: set[bytes]) -> Iterator[Listed]:
    """Removes the objects, some at a time, and yields them. Adds the SHA-256 of images to `images`."""
    while batch := list(islice(dead, BATCH)):
        closed.keep_closed()
        bucket.remove([one.key for one in batch])
        images.update(bytes.fromhex(match["sha256"]) for one in batch if (match := _IMAGE.fullmatch(one.key)))
        yield from batch


class _Closed:
    """The manifest of an object store, closed to pushes. Its `collection` is increased by one."""

    def __init__(self, state: StateDir, bucket: Bucket, remote: Remote) -> None:
        self._state, self._bucket = state, bucket
        self.remote = remote
        self._set(collection=remote.manifest.collection + 1, closed_until=time.time() + CLOSED_S)

    def keep_closed(self) -> None:
        """Raises StoreError."""
        now = time.time()
        closed_until = self.remote.manifest.closed_until
        if now > closed_until - MARGIN_S:
            raise StoreError(f"{self._bucket.url} responded too slowly: the collection ended early; start it again")
        if now > closed_until - CLOSED_S / 2:
            self._set(closed_until=now + CLOSED_S)

    def open(self) -> None:
        """Raises StoreError."""
        self._set(closed_until=0.0)

    def _set(self, **changes: float) -> None:
        manifest = replace(self.remote.manifest, **changes)  # pyright: ignore[reportArgumentType]
        swap(self._state, self._bucket, manifest, self.remote)
        found = read_remote(self._bucket)
        if found is None or found.manifest != manifest:
            raise StoreError(f"{self._bucket.url} was changed meanwhile: collect its garbage again")
        self.remote = found
        write_base(self._state.root, manifest)


@contextmanager
def _closed(state: StateDir, bucket: Bucket) -> Iterator[_Closed]:
    # The rows here must be those of the manifest that is closed: another folder may have pushed since our push.
    remote = need_known(state, bucket)
    assert remote is not None, "it was pushed to just now"
    closed = _Closed(state, bucket, remote)
    try:
        yield closed
    finally:
        closed.open()


def _dead(
    state: StateDir, bucket: Bucket, remote: Remote, *, before: float, on_progress: OnProgress | None
) -> Iterator[Listed]:
    """Objects that were uploaded before `before` (Unix time) and that neither the manifest nor, for images, a row
    names. An image of a row is included if a pack with it was also uploaded before that time."""
    manifest = remote.manifest
    named = {file.key(path) for path, file in manifest.files.items()} | manifest.retired_objects.keys()
    used = used_images((state.tables, state.trajectories), on_progress)
    packs = {path for path in manifest.files if is_pack(path)}
    settled = {PurePosixPath(one.key).name for one in bucket.list(PACKS) if one.key in packs and one.modified < before}
    blobs = BlobStore(state.blobs)
    found = counted(bucket.list(), on_progress, "looking for unused objects", "objects")
    listed = (one for one in found if one.modified < before and one.key not in named)
    while batch := list(islice(listed, BATCH)):
        yield from (one for one in batch if _FILE.fullmatch(one.key))
        images = [(match["sha256"], one) for one in batch if (match := _IMAGE.fullmatch(one.key))]
        unused = set(absent([sha256 for sha256, _ in images], used))
        for place, (sha256, one) in enumerate(images):
            if place in unused or any(entry.pack in settled for entry in blobs.packs.entries(sha256)):
                yield one


def _total(objects: Iterable[Listed]) -> RemoteGarbage:
    counts = Counter[str]()
    for one in objects:
        kind = "image" if _IMAGE.fullmatch(one.key) else "file"
        counts[f"num_{kind}s"] += 1
        counts[f"{kind}_bytes"] += one.num_bytes
    return RemoteGarbage(**counts)
