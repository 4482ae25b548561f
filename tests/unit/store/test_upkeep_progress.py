"""Upkeep reports what it does, and each kind of work up to its own total."""

import os
import time
from pathlib import Path

import pytest
from episode_samples import make_episode, make_step
from old_parts import make_old
from progress_reports import last_of_each, never_falls

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.progress import Progress
from osworld_pipeline.runs.upkeep.migrate import migrate_state
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, missing_blobs, rebuild_store
from osworld_pipeline.store import BlobStore, TrajectoryStore, packing
from osworld_pipeline.store.packing import pack_cold_images
from osworld_pipeline.tables.catalog import rebuild_catalog

NUM_PARTS = 5


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Each part has one image, stored ten days ago; one more image is in no row."""
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for part in range(NUM_PARTS):
        sha256 = store.write_blob(f"image {part}".encode(), suffix="png")
        store.write_episodes(f"p{part}", [make_episode(f"e{part}", steps=(make_step(sha256=sha256),))])
    store.write_blob(b"unused", suffix="png")
    for _, path, _ in BlobStore(state.blobs).list():
        os.utime(path, (time.time() - 864_000,) * 2)
    rebuild_catalog(state)
    return state


def num_folders(state: StateDir) -> int:
    return len(list(state.blobs.glob("[0-9a-f][0-9a-f]")))


def test_compaction_counts_the_files_that_it_merges_and_all_cold_images(state: StateDir) -> None:
    seen: list[Progress] = []
    folders = num_folders(state)
    compact_store(state, min_parts=1, on_progress=seen.append)
    assert never_falls(seen)
    # So few images stay files; they were looked at.
    assert last_of_each(seen) == {
        "reading episodes": (NUM_PARTS, NUM_PARTS, "files"),
        "merging episodes": (NUM_PARTS, NUM_PARTS, "files"),
        "building the catalog": (0, 0, ""),
        "looking for cold images": (folders, folders, "folders"),
        "packing cold images": (NUM_PARTS + 1, NUM_PARTS + 1, "images"),
    }


def test_packing_in_several_passes_counts_to_the_number_of_all_cold_images(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SCAN_IMAGES", 2)
    seen: list[Progress] = []
    done = pack_cold_images(BlobStore(state.blobs), min_bytes=0, on_progress=seen.append)
    assert (done.num_images, done.num_packs) == (NUM_PARTS + 1, 3)
    packed = [(one.done, one.total) for one in seen if one.unit == "images"]
    assert list(dict.fromkeys(packed)) == [(number, NUM_PARTS + 1) for number in (0, 2, 4, 6)]


def test_garbage_collection_counts_files_folders_and_packs(state: StateDir) -> None:
    pack_cold_images(BlobStore(state.blobs), min_bytes=0)
    later = TrajectoryStore(state).write_blob(b"unused, and no pack has it", suffix="png")
    seen: list[Progress] = []
    folders = num_folders(state)
    done = collect_garbage(state, grace_s=-10, on_progress=seen.append)
    assert later not in {sha256 for sha256, _, _ in BlobStore(state.blobs).list()}
    assert done.num_images == 1
    num_files = len(list(state.trajectories.rglob("*.parquet")))
    assert never_falls(seen)
    assert last_of_each(seen) == {
        "reading the rows of trajectories": (num_files, num_files, "files"),
        "looking for unused images": (folders, folders, "folders"),
        "reading the indexes of packs": (1, 1, "indexes"),
    }


def test_search_for_missing_images_counts_the_files_that_name_them(state: StateDir) -> None:
    seen: list[Progress] = []
    folders, num_files = num_folders(state), len(list(state.trajectories.rglob("*.parquet")))
    assert missing_blobs(state, seen.append) == {}
    assert never_falls(seen)
    ends = last_of_each(seen)
    assert ends["listing images"] == (folders, folders, "folders")
    assert ends["reading the rows of trajectories"] == (num_files, num_files, "files")


def test_rebuild_counts_the_compacted_files(state: StateDir) -> None:
    compact_store(state, min_parts=1)
    seen: list[Progress] = []
    rebuild_store(state, seen.append)
    assert last_of_each(seen) == {
        "reading episodes": (1, 1, "files"),
        "building the catalog": (0, 0, ""),
    }


def test_migration_counts_the_files_that_it_reads_and_rewrites(state: StateDir) -> None:
    make_old(state)
    seen: list[Progress] = []
    migrate_state(state, seen.append)
    assert never_falls(seen)
    assert last_of_each(seen) == {
        "reading the formats of episodes": (NUM_PARTS, NUM_PARTS, "files"),
        "moving token lists": (NUM_PARTS, NUM_PARTS, "files"),
        "reading episodes": (NUM_PARTS, NUM_PARTS, "files"),
        "merging episodes": (NUM_PARTS, NUM_PARTS, "files"),
        "building the catalog": (0, 0, ""),
    }
