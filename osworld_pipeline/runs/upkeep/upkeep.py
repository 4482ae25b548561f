"""Maintenance of a state folder during other work: compaction of small parts, packing of cold images, garbage
collection, repair, and the check for missing images."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store.note import is_cache
from osworld_pipeline.progress import OnProgress, begin
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.compaction import (
    RETIRED_GRACE_S,
    TARGET_BYTES,
    CompactionSummary,
    compact_parts,
    exclusive,
    remove_retired,
)
from osworld_pipeline.store.garbage import (
    missing_images,
    remove_part_files,
    stale_part_files,
    unused_images,
    used_images,
)
from osworld_pipeline.store.holdings import RepairSummary, rebuild_manifest
from osworld_pipeline.store.merging import LEFT_PARTS, num_small_parts
from osworld_pipeline.store.old_tokens import need_sequences
from osworld_pipeline.store.pack_garbage import collect_packs
from osworld_pipeline.store.packing import COLD_DAYS, is_packing_due, pack_cold_images, pack_some
from osworld_pipeline.store.part_files import DETAILS_OF
from osworld_pipeline.tables.builds import REPLACED_GRACE_S, remove_replaced_builds
from osworld_pipeline.tables.catalog import rebuild_catalog

GRACE_S = 86_400.0
"""An update stores its screenshots while it runs and its rows at its end, so no update may take longer than this."""


def compact_store(
    state: StateDir,
    *,
    min_parts: int = 8,
    target_bytes: int = TARGET_BYTES,
    budget_bytes: int | None = None,
    retired_grace_s: float = RETIRED_GRACE_S,
    cold_days: float = COLD_DAYS,
    on_progress: OnProgress | None = None,
) -> CompactionSummary:
    """Merges many small parts into few large files, and packs images that were not written or touched for `cold_days`;
    safe during writes and reads. `budget_bytes`: limit of the bytes read per table; images then have a separate budget.

    Raises:
        StoreError: the folder is a cache of an object store, other maintenance is running, or as compact_parts.
        TableError: as rebuild_catalog.
    """
    if is_cache(state.root):
        raise StoreError(f"{state.root} is a cache: compact the original state, and pull again")
    done = compact_parts(
        state.trajectories,
        min_parts=min_parts,
        target_bytes=target_bytes,
        budget_bytes=budget_bytes,
        retired_grace_s=retired_grace_s,
        on_progress=on_progress,
    )
    if done.num_written and state.catalog.is_file():
        begin(on_progress, "building the catalog")
        rebuild_catalog(state)  # so that a client that opens it by itself skips the retired files
    if budget_bytes is None:
        with exclusive(state.trajectories):
            packed = pack_cold_images(BlobStore(state.blobs), cold_s=cold_days * 86_400, on_progress=on_progress)
    else:
        packed = pack_some(state)
    return done if packed is None else replace(done, num_images=packed.num_images, num_packs=packed.num_packs)


def is_compaction_due(state: StateDir) -> bool:
    """Whether a table has enough small parts, or a search for cold images is due. Raises StoreError."""
    has_parts = any(num_small_parts(state.trajectories, head) >= LEFT_PARTS for head in DETAILS_OF)
    return has_parts or (not is_cache(state.root) and is_packing_due(BlobStore(state.blobs)))


@dataclass(frozen=True, kw_only=True)
class GarbageSummary:
    """What was removed, or would be removed."""

    num_images: int
    image_bytes: int
    num_part_files: int
    part_bytes: int
    num_retired: int
    """Files that a compaction had replaced, not counting details; 0 in a dry run, which does not count them."""


def collect_garbage(
    state: StateDir,
    *,
    grace_s: float = GRACE_S,
    retired_grace_s: float = RETIRED_GRACE_S,
    is_dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> GarbageSummary:
    """Removes images that no table row names and that were not written within `grace_s` (from a pack only if more than
    a quarter of it is unused), files of parts that were replaced more than `retired_grace_s` ago, replaced builds of
    the union tables, and leftovers of killed writers; safe during writes and reads. `is_dry_run`: removes nothing.

    Raises:
        StoreError: other maintenance is running, or a file cannot be read, so that its references are unknown.
        TableError: the note that names the current build is damaged.
    """
    with exclusive(state.trajectories):
        num_retired = 0 if is_dry_run else remove_retired(state.trajectories, grace_s=retired_grace_s)
        stale = stale_part_files(state.trajectories, retired_grace_s=retired_grace_s, grace_s=grace_s)
        if not is_dry_run:
            remove_part_files(stale.paths, on_progress)
            remove_replaced_builds(state, grace_s=max(grace_s, REPLACED_GRACE_S))
        blobs = BlobStore(state.blobs)
        before = time.time() - grace_s
        num_images = image_bytes = 0
        used = used_images(_folders(state), on_progress)
        for images in unused_images(blobs, used, before=before, on_progress=on_progress):
            removed = len(images.paths), images.num_bytes
            if not is_dry_run:
                removed = blobs.remove_unused(images.paths, before=before)
            num_images, image_bytes = num_images + removed[0], image_bytes + removed[1]
        removed = collect_packs(blobs, used, before=before, is_dry_run=is_dry_run, on_progress=on_progress)
        num_images, image_bytes = num_images + removed[0], image_bytes + removed[1]
    return GarbageSummary(
        num_images=num_images,
        image_bytes=image_bytes,
        num_part_files=len(stale.paths),
        part_bytes=stale.num_bytes,
        num_retired=num_retired,
    )


def rebuild_store(state: StateDir, on_progress: OnProgress | None = None) -> RepairSummary:
    """Rebuilds the compaction's manifest if it disagrees with the parts, and the catalog in any case.

    Raises:
        StoreError: other maintenance is running, a file is damaged, or the file system refused.
        TableError: a table is damaged.
    """
    need_sequences(state.trajectories)
    done = rebuild_manifest(state.trajectories, on_progress)
    begin(on_progress, "building the catalog")
    rebuild_catalog(state)
    return done


def missing_blobs(state: StateDir, on_progress: OnProgress | None = None) -> Mapping[str, Path]:
    """SHA-256 of each image that a table row names and the store lacks, with a file that names it.

    Raises:
        StoreError: a file cannot be read.
    """
    return missing_images(BlobStore(state.blobs), _folders(state), on_progress)


def _folders(state: StateDir) -> tuple[Path, ...]:
    return state.tables, state.trajectories
