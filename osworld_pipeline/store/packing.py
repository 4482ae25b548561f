"""Moves cold images from single files into packs, concurrently with readers and writers. A byte limit (`pack_some`,
`budget_bytes`) bounds the work of a call.

First the pack is synced, then its index, then the packed files are removed, so an image is always in at least one
place. After a kill, the next packing indexes a pack without an index and removes files that are already packed.
"""

import heapq
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreBusyError, StoreError
from osworld_pipeline.object_store.note import is_cache
from osworld_pipeline.progress import OnProgress, Tally
from osworld_pipeline.store.blobs import INCOMING, BlobStore
from osworld_pipeline.store.compaction import exclusive
from osworld_pipeline.store.pack_files import MAX_IMAGE_BYTES, MAX_IMAGES
from osworld_pipeline.store.pack_merging import merge_indexes
from osworld_pipeline.store.packs import index_pack, write_pack

log = logging.getLogger(__name__)
COLD_DAYS = 3.0
"""An image that was not written or touched for this long is packed."""
PACK_BYTES = 128 << 20
MIN_BYTES = 64 << 20
"""Less than this stays in files, to avoid many small packs."""
RUN_BYTES = 2 << 30
"""Bytes packed at the end of a program, or by the schedule: about ten seconds of disk time."""
SCAN_IMAGES = 50_000
"""Number of the oldest images found in one pass over the files; a run with a limit makes one pass."""
AGAIN_S = 21_600.0
"""Interval before the next automatic pass after one that found nothing more to pack, because a pass stats every
file."""
SCANNED = "packed-until"
_READ_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class PackingSummary:
    num_images: int = 0
    """Images packed."""
    num_packs: int = 0
    """Packs written."""
    num_removed: int = 0
    """Removed files whose images are in packs."""
    num_damaged: int = 0
    """Skipped files whose content does not match their name."""


@dataclass(frozen=True, kw_only=True)
class ColdImage:
    path: Path
    modified: float
    num_bytes: int

    @property
    def sha256(self) -> str:
        return self.path.stem


def pack_cold_images(
    blobs: BlobStore,
    *,
    cold_s: float = COLD_DAYS * 86_400,
    budget_bytes: int | None = None,
    pack_bytes: int = PACK_BYTES,
    min_bytes: int = MIN_BYTES,
    on_progress: OnProgress | None = None,
) -> PackingSummary:
    """Packs images that were not written or touched for `cold_s`, the oldest first; the caller holds the upkeep lock.

    `budget_bytes`: limit of the bytes packed, in one pass over the files; None: no limit.

    Raises:
        StoreError: an index or a pack is damaged, or the file system refused.
    """
    blobs.remove_stale_temps()
    adopt_packs(blobs)
    before = time.time() - cold_s
    done = PackingSummary()
    cold, num_old = oldest(blobs, before=before, number=SCAN_IMAGES, on_progress=on_progress)
    handled = Tally(on_progress, "packing cold images", num_old, "images")
    while True:
        is_all = len(cold) < SCAN_IMAGES
        step, is_spent = _pack(blobs, cold, before, budget_bytes, pack_bytes, min_bytes if is_all else 0, handled)
        done = _plus(done, step)
        if is_all or is_spent or budget_bytes is not None or step.num_removed == 0:
            break
        cold, _ = oldest(blobs, before=before, number=SCAN_IMAGES)
    if is_all and not is_spent:
        write_file(blobs.root / SCANNED, f"{before:.0f}\n".encode(), temp_folder=blobs.root / INCOMING)
    else:
        (blobs.root / SCANNED).unlink(missing_ok=True)
    merge_indexes(blobs.packs, temp_folder=blobs.root / INCOMING, budget_bytes=budget_bytes)
    return done


def pack_some(state: StateDir) -> PackingSummary | None:
    """A bounded packing that does not raise: None if none is due, if other upkeep runs, in a cache of an object store,
    or after an error, which is logged."""
    try:
        blobs = BlobStore(state.blobs)
        if is_cache(state.root) or not is_packing_due(blobs):
            return None
        with exclusive(state.trajectories, timeout_s=0):
            return pack_cold_images(blobs, budget_bytes=RUN_BYTES)
    except StoreBusyError:
        return None
    except StoreError as error:
        log.warning("the images in %s are not packed: %s", state.blobs, error)
        return None


def is_packing_due(blobs: BlobStore) -> bool:
    """Whether the next pass over the files is due."""
    try:
        return (blobs.root / SCANNED).stat().st_mtime < time.time() - AGAIN_S
    except FileNotFoundError:
        return next(blobs.list(), None) is not None


def oldest(
    blobs: BlobStore, *, before: float, number: int, on_progress: OnProgress | None = None
) -> tuple[list[ColdImage], int]:
    """The `number` oldest images that were last touched before `before` (Unix time), in the order of that time, so that
    images stored together are packed together. Also returns how many images are that old in all."""
    num_old = 0

    def old() -> Iterator[tuple[float, str, int]]:
        nonlocal num_old
        for sha256, path, state in blobs.list(on_progress, "looking for cold images"):
            if state.st_mtime < before and len(sha256) == 64 and 0 < state.st_size <= MAX_IMAGE_BYTES:
                num_old += 1
                yield state.st_mtime, str(path), state.st_size

    chosen = heapq.nsmallest(number, old())
    return [ColdImage(path=Path(path), modified=modified, num_bytes=size) for modified, path, size in chosen], num_old


def adopt_packs(blobs: BlobStore) -> int:
    """Indexes packs that no index names, after a lost index or a killed packing. Returns how many. Raises
    StoreError."""
    packs = blobs.packs
    new = sorted(packs.here() - packs.named())
    for name in new:
        index_pack(packs.root, name, temp_folder=blobs.root / INCOMING)
    return len(new)


def _pack(
    blobs: BlobStore,
    cold: Sequence[ColdImage],
    before: float,
    budget_bytes: int | None,
    pack_bytes: int,
    min_bytes: int,
    handled: Tally,
) -> tuple[PackingSummary, bool]:
    """Returns the summary, and whether the budget was too small for all of them."""
    packed, new = _split(blobs, cold)
    done = PackingSummary(num_removed=blobs.remove_unused([image.path for image in packed], before=before)[0])
    handled.add(len(packed))
    groups = list(_groups(new, pack_bytes))
    if groups and sum(image.num_bytes for image in groups[-1]) < min_bytes:
        handled.add(len(groups.pop()))
    num_bytes = 0
    for group in groups:
        size = sum(image.num_bytes for image in group)
        if budget_bytes is not None and num_bytes and num_bytes + size > budget_bytes:
            return done, True
        num_bytes += size
        done = _plus(done, _write(blobs, group, before))
        handled.add(len(group))
    return done, False


def _split(blobs: BlobStore, cold: Sequence[ColdImage]) -> tuple[list[ColdImage], list[ColdImage]]:
    """The images that are intact in a pack, and the others."""
    packed: list[ColdImage] = []
    new: list[ColdImage] = []
    for image in cold:
        try:
            is_packed = blobs.packs.read(image.sha256) is not None
        except StoreError as error:
            log.warning("%s is packed again: %s", image.path, error)
            is_packed = False
        (packed if is_packed else new).append(image)
    return packed, new


def _groups(images: Sequence[ColdImage], pack_bytes: int) -> Iterator[list[ColdImage]]:
    """One group for each pack."""
    group: list[ColdImage] = []
    num_bytes = 0
    for image in images:
        if group and (num_bytes + image.num_bytes > pack_bytes or len(group) == MAX_IMAGES):
            yield group
            group, num_bytes = [], 0
        group.append(image)
        num_bytes += image.num_bytes
    if group:
        yield group


def _write(blobs: BlobStore, group: Sequence[ColdImage], before: float) -> PackingSummary:
    whole: list[Path] = []
    damaged: list[Path] = []

    def images() -> Iterator[tuple[str, bytes, float]]:
        for image, data in _read(group):
            if data is None:
                continue
            if digest_bytes(data) == image.sha256:
                whole.append(image.path)
                yield image.path.name, data, image.modified
            else:
                damaged.append(image.path)

    contents = images()
    first = next(contents, None)
    if first is not None:
        write_pack(blobs.packs.root, chain([first], contents), temp_folder=blobs.root / INCOMING)
    for path in damaged:
        log.warning("the content of %s does not match its name, so it is not packed: restore it from a copy", path)
    return PackingSummary(
        num_images=len(whole),
        num_packs=int(first is not None),
        num_removed=blobs.remove_unused(whole, before=before)[0],
        num_damaged=len(damaged),
    )


def _read(group: Iterable[ColdImage]) -> Iterator[tuple[ColdImage, bytes | None]]:
    """Reads several files in parallel, which is faster. None if one is gone."""

    def read(image: ColdImage) -> bytes | None:
        try:
            return image.path.read_bytes()
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="pack") as pool:
        images = iter(group)
        while some := list(islice(images, _READ_AT_ONCE)):
            yield from zip(some, pool.map(read, some), strict=True)


def _plus(one: PackingSummary, other: PackingSummary) -> PackingSummary:
    return PackingSummary(
        **{name: getattr(one, name) + getattr(other, name) for name in PackingSummary.__dataclass_fields__}
    )
