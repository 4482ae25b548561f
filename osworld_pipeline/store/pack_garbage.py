"""Removes unreferenced images from packs: a pack with enough dead bytes is rewritten without them."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.progress import OnProgress, tracked
from osworld_pipeline.store.blobs import INCOMING, BlobStore
from osworld_pipeline.store.image_sets import absent, absent_keys, gather
from osworld_pipeline.store.pack_files import Member, read_image, read_members
from osworld_pipeline.store.pack_index import image_keys
from osworld_pipeline.store.packs import index_path, write_pack
from osworld_pipeline.store.touches import TouchReader, remove_old_journals

MAX_DEAD_SHARE = 0.25
"""Share of dead bytes above which a pack is rewritten."""
REWRITE_BYTES = 8 << 30
"""Bytes rewritten by one collection; the packs with the largest dead shares come first."""


@dataclass(frozen=True, kw_only=True)
class DeadShare:
    """Dead bytes of one pack."""

    pack: str
    num_dead: int
    dead_bytes: int
    num_bytes: int

    @property
    def share(self) -> float:
        return self.dead_bytes / max(1, self.num_bytes)


def dead_shares(
    blobs: BlobStore, used: np.ndarray, *, before: float, on_progress: OnProgress | None = None
) -> list[DeadShare]:
    """The packs with more than MAX_DEAD_SHARE of dead bytes, the largest share first. Dead are images whose keys are
    not in `used` and that were not stored or touched since `before` (Unix time). Raises StoreError."""
    here = blobs.packs.here()
    blobs.packs.check()
    totals: dict[str, np.ndarray] = {}
    for index in tracked(blobs.packs.indexes(), on_progress, "reading the indexes of packs", "indexes"):
        counts = np.zeros((3, len(index.packs)), np.int64)
        for records in index.chunks():
            sizes = records["num_bytes"].astype(np.int64)
            is_dead = absent_keys(image_keys(records), used) & (records["modified"] < before)
            np.add.at(counts[0], records["pack"], is_dead)
            np.add.at(counts[1], records["pack"], sizes * is_dead)
            np.add.at(counts[2], records["pack"], sizes)
        # Two indexes with the same pack have the same records of it.
        totals |= {name: counts[:, place] for place, name in enumerate(index.packs) if name in here}
    found = [
        DeadShare(pack=name, num_dead=int(count[0]), dead_bytes=int(count[1]), num_bytes=int(count[2]))
        for name, count in totals.items()
    ]
    return sorted((one for one in found if one.share > MAX_DEAD_SHARE), key=lambda one: (-one.share, one.pack))


def collect_packs(
    blobs: BlobStore,
    used: np.ndarray,
    *,
    before: float,
    is_dry_run: bool,
    budget_bytes: int = REWRITE_BYTES,
    on_progress: OnProgress | None = None,
) -> tuple[int, int]:
    """Removes dead images from packs, or only counts them; returns their number and bytes. `used` was read before this
    call; the caller holds the upkeep lock.

    Raises:
        StoreError: an index or a pack is damaged, or the file system refused.
    """
    touched = TouchReader(blobs.root, since=before)
    recent = gather(touched.news())
    used = np.union1d(used, recent) if len(recent) else used
    num_images = num_bytes = num_rewritten = 0
    found = dead_shares(blobs, used, before=before, on_progress=on_progress)
    for dead in tracked(found, None if is_dry_run else on_progress, "rewriting packs", "packs"):
        num_live = dead.num_bytes - dead.dead_bytes
        if num_live and num_rewritten and num_rewritten + num_live > budget_bytes:
            continue
        num_rewritten += num_live
        if not is_dry_run:
            _rewrite(blobs, dead.pack, used, touched, before)
        num_images, num_bytes = num_images + dead.num_dead, num_bytes + dead.dead_bytes
    if not is_dry_run:
        remove_old_journals(blobs.root, before=before)
    return num_images, num_bytes


def _rewrite(blobs: BlobStore, pack: str, used: np.ndarray, touched: TouchReader, before: float) -> None:
    """Raises StoreError, and leaves the pack unchanged, if a needed image cannot be read from it."""
    path = blobs.packs.path(pack)
    members = read_members(path)
    dead = {place for place in absent([member.sha256 for member in members], used) if members[place].modified < before}
    # A collection killed between writing the new pack and removing the old one leaves both.
    live = [m for place, m in enumerate(members) if place not in dead and not _is_elsewhere(blobs, m.sha256, pack)]
    if live:
        write_pack(blobs.packs.root, _images(path, live), temp_folder=blobs.root / INCOMING)
    kept = {member.sha256: member for member in (members[place] for place in dead)}
    with blobs.locked(is_shared=False):
        for sha256 in {name for names in touched.news() for name in names} & kept.keys():
            member = kept[sha256]
            data = read_image(path, sha256, offset=member.offset, num_bytes=member.num_bytes)
            write_file(blobs.root / sha256[:2] / member.name, data, temp_folder=blobs.root / INCOMING)
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        index_path(blobs.packs.root, pack).unlink()


def _is_elsewhere(blobs: BlobStore, sha256: str, pack: str) -> bool:
    entries = (entry for entry in blobs.packs.entries(sha256) if entry.pack != pack)
    return any(blobs.packs.path(entry.pack).is_file() for entry in entries)


def _images(path: Path, members: Sequence[Member]) -> Iterator[tuple[str, bytes, float]]:
    for member in members:
        data = read_image(path, member.sha256, offset=member.offset, num_bytes=member.num_bytes)
        yield member.name, data, member.modified
