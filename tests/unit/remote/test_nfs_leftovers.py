"""An NFS client renames a file that is deleted while it is open to `.nfs...` in the same folder. Such files are not
part of a state: nothing reads, counts, deletes or pushes them, and they block no operation."""

import os
from pathlib import Path

from s3_server import S3
from viewer_samples import write_sample_store

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.remote.pull import pull
from osworld_pipeline.remote.push import push
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, missing_blobs, rebuild_store
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.store.packing import pack_cold_images
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

LEFTOVER = ".nfs000000000001e24500000003"
COUNTS = "SELECT (SELECT count(*) FROM episodes), (SELECT count(*) FROM steps), (SELECT count(*) FROM evals)"


def add_leftovers(state: StateDir) -> set[Path]:
    """Adds one to each folder of the state, old enough to be removed as garbage."""
    folders = [state.root, *(path for path in state.root.rglob("*") if path.is_dir())]
    for folder in folders:
        (folder / LEFTOVER).write_bytes(b"deleted, and still open somewhere")
        os.utime(folder / LEFTOVER, (0, 0))
    return {folder / LEFTOVER for folder in folders}


def test_files_that_nfs_keeps_for_open_handles_are_not_part_of_a_state(s3: S3, url: str, tmp_path: Path) -> None:
    state, cache = StateDir(tmp_path / "state"), StateDir(tmp_path / "cache")
    write_sample_store(state)
    rebuild_catalog(state)
    expected = run_query(state, COUNTS).rows
    added = add_leftovers(state)
    store = TrajectoryStore(state)
    parts = store.existing_parts()
    compact_store(state, min_parts=1)
    pack_cold_images(BlobStore(state.blobs), cold_s=-10, min_bytes=0)
    collect_garbage(state, grace_s=0)
    rebuild_store(state)
    assert run_query(state, COUNTS).rows == expected
    assert (store.existing_parts(), missing_blobs(state)) == (parts, {})
    assert {path for path in added if not path.is_file()} == set()

    push(state, url)
    pull(cache, url)
    assert run_query(cache, COUNTS).rows == expected
    assert list(cache.root.rglob(".nfs*")) == []
