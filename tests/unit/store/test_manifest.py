"""A compaction's manifest that is lost, damaged or old: nothing is read wrong, nothing is deleted, and it can be made
again from the parts."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, rebuild_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import COMPACTED, MANIFEST, Manifest, take_snapshot
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

OLD_S = 1_000_000


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Twelve episodes in one compacted file, which a second compaction made; no other file holds them."""
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    store = TrajectoryStore(state)
    for round_ in range(2):
        for part in range(2):
            name = f"p{round_}{part}"
            store.write_episodes(name, [make_episode(f"{name}-e{index}") for index in range(3)])
        compact_store(state, min_parts=2, retired_grace_s=0)
        shutil.copy(manifest_of(state), state.root / f"manifest-{round_}")
    compact_store(state, min_parts=2, retired_grace_s=0)
    for path in state.trajectories.rglob("*.parquet"):
        age(path)
    return state


def manifest_of(state: StateDir) -> Path:
    return state.trajectories / MANIFEST


def age(path: Path) -> None:
    os.utime(path, (time.time() - OLD_S, time.time() - OLD_S))


def part_files(state: StateDir) -> set[str]:
    return {str(path.relative_to(state.trajectories)) for path in state.trajectories.rglob("*.parquet")}


def num_episodes(state: StateDir) -> tuple:
    return run_query(state, "SELECT count(*), count(DISTINCT episode_id), sum(num_steps) FROM episodes").rows[0]


def test_a_lost_manifest_stops_the_collection_and_is_made_again_from_the_parts(state: StateDir) -> None:
    before, files = Manifest.read(state.trajectories), part_files(state)
    manifest_of(state).unlink()
    for act in (collect_garbage, compact_store, num_episodes, lambda state: TrajectoryStore(state).existing_parts()):
        with pytest.raises(StoreError, match=r"compacted.json is missing, but .*rebuild-catalog"):
            act(state)
    assert part_files(state) == files
    assert rebuild_store(state).is_changed
    assert Manifest.read(state.trajectories).files == before.files
    assert num_episodes(state) == (12, 12, 24)
    assert not rebuild_store(state).is_changed
    collect_garbage(state, retired_grace_s=0)
    assert part_files(state) == files


def names(state: StateDir) -> set[str]:
    return set(take_snapshot(state.trajectories, "episodes").compacted)


@pytest.mark.parametrize("copy", ["manifest-0", "manifest-1"])
def test_an_older_manifest_stops_the_collection_and_is_made_again(state: StateDir, copy: str) -> None:
    files = part_files(state)
    shutil.copy(state.root / copy, manifest_of(state))
    if copy == "manifest-0":
        with pytest.raises(StoreError, match=r"compacted.json is of generation 1, but .* of generation 2"):
            collect_garbage(state, retired_grace_s=0)
    rebuild_store(state)
    assert num_episodes(state) == (12, 12, 24)
    collect_garbage(state, retired_grace_s=0)
    assert part_files(state) == files


def test_a_manifest_that_lists_nothing_does_not_lose_a_part(state: StateDir) -> None:
    """A copy of a folder that was made during a compaction may have such a manifest."""
    files = part_files(state)
    manifest_of(state).write_bytes(Manifest(generation=99).to_bytes())
    with pytest.raises(StoreError, match=r"is in no manifest, but part 'p00' \(4 in all\) is in no other file"):
        collect_garbage(state, retired_grace_s=0)
    assert part_files(state) == files
    rebuild_store(state)
    assert num_episodes(state) == (12, 12, 24)


def test_a_damaged_manifest_is_made_again_and_parts_written_since_count(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("p00", [make_episode("p00-e0", num_steps=5)])
    store.write_episodes("p9", [make_episode("p9-e0")])
    manifest_of(state).write_bytes(b"{")
    with pytest.raises(StoreError, match="is damaged"):
        collect_garbage(state)
    rebuild_store(state)
    assert num_episodes(state) == (11, 11, 9 * 2 + 5 + 2)
    compact_store(state, min_parts=1, retired_grace_s=0)
    assert num_episodes(state) == (11, 11, 9 * 2 + 5 + 2)


def test_a_compacted_file_that_is_gone_is_named_and_the_rest_can_be_kept(state: StateDir) -> None:
    TrajectoryStore(state).write_episodes("p9", [make_episode("p9-e0")])
    (name,) = names(state)
    for table in ("episodes", "steps"):
        (state.trajectories / table / COMPACTED / name).unlink()
    with pytest.raises(StoreError, match=rf"{name} is missing, and the manifest names it"):
        collect_garbage(state)
    assert rebuild_store(state).num_lost == 1
    assert num_episodes(state) == (1, 1, 2)


KILLED = """
import os, sys
from pathlib import Path
from osworld_pipeline.store import compacted_files, compaction
number, real = int(sys.argv[2]), compacted_files.replacing
def replacing(path, **named):
    global number
    number -= 1
    if number < 0:
        os.kill(os.getpid(), 9)
    return real(path, **named)
def write_file(path, data, **named):
    with replacing(path, **named) as temp:
        temp.write_bytes(data)
compacted_files.replacing, compaction.write_file = replacing, write_file
compaction.compact_parts(Path(sys.argv[1]), min_parts=1, target_bytes=1)
"""


@pytest.mark.parametrize(("num_writes", "is_lost"), [(1, False), (3, True), (4, False), (5, True)])
def test_a_compaction_killed_after_any_write_loses_no_row_even_if_the_manifest_is_lost(
    tmp_path: Path, num_writes: int, is_lost: bool
) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for part in range(2):
        store.write_episodes(f"p{part}", [make_episode(f"p{part}-e{index}") for index in range(3)])
    rebuild_catalog(state)
    command = [sys.executable, "-c", KILLED, str(state.trajectories), str(num_writes)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    assert num_episodes(state) == (6, 6, 12)
    if is_lost:
        manifest_of(state).unlink()
        rebuild_store(state)
    assert num_episodes(state) == (6, 6, 12)
    for path in state.trajectories.rglob("*.parquet"):
        age(path)
    collect_garbage(state, retired_grace_s=0)
    assert num_episodes(state) == (6, 6, 12)
    compact_store(state, min_parts=1, retired_grace_s=0)
    compact_store(state, min_parts=1, retired_grace_s=0)
    collect_garbage(state, retired_grace_s=0)
    assert num_episodes(state) == (6, 6, 12)
