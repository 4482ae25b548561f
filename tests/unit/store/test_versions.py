"""Versions of parts grow even if the clocks of the hosts differ."""

import time
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store
from osworld_pipeline.store import TrajectoryStore, versions
from osworld_pipeline.store.part_files import VERSION_SHIFT, PartFile, list_names
from osworld_pipeline.store.versions import next_version
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

AHEAD_MS = 3_600_000


def put_ahead(state: StateDir, part: str) -> None:
    """Gives a part's files the version of a host whose clock is an hour ahead."""
    for path in state.trajectories.glob(f"*/{part}~*.parquet"):
        file = PartFile.parse(path.name)
        assert file is not None
        later = file.version + (AHEAD_MS << VERSION_SHIFT)
        path.rename(path.with_name(path.name.replace(f"{file.version:016x}", f"{later:016x}")))


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    store = TrajectoryStore(state)
    for part in ("a", "b"):
        store.write_episodes(part, [make_episode(part)])
    put_ahead(state, "a")
    return state


def counts(state: StateDir) -> tuple:
    return run_query(state, "SELECT count(*), sum(num_steps) FROM episodes").rows[0]


def test_a_part_written_again_by_a_host_whose_clock_is_behind_replaces_the_earlier_one(state: StateDir) -> None:
    again = make_episode("a", num_steps=5)
    TrajectoryStore(state).write_episodes("a", [again])
    assert TrajectoryStore(state).read_episodes("a") == (again,)
    assert counts(state) == (2, 7)
    collect_garbage(state, retired_grace_s=-1, grace_s=-1)
    assert TrajectoryStore(state).read_episodes("a") == (again,)
    compact_store(state, min_parts=1, retired_grace_s=0)
    assert counts(state) == (2, 7)


def test_a_version_is_later_than_those_in_compacted_files(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    later = time.time() + AHEAD_MS / 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: int(later * 1e9))
        patch.setattr("osworld_pipeline.store.versions._last_ms", 0)
        store.write_episodes("a", [make_episode("a")])
    compact_store(state, min_parts=1, retired_grace_s=0)
    compact_store(state, min_parts=1, retired_grace_s=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("osworld_pipeline.store.versions._last_ms", 0)
        store.write_episodes("a", [make_episode("a", num_steps=5)])
    (path,) = (state.trajectories / "episodes").glob("a~*.parquet")
    file = PartFile.parse(path.name)
    assert file is not None
    assert file.version >> VERSION_SHIFT > later * 1000 - 1


def test_a_small_folder_is_listed_before_every_write_even_on_a_slow_machine(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_listing(folder: Path) -> list[str]:
        time.sleep(0.02)
        return list_names(folder)

    monkeypatch.setattr(versions, "list_names", slow_listing)
    first = next_version(state.trajectories, "episodes")
    put_ahead(state, "a")  # by another hour
    assert next_version(state.trajectories, "episodes") > first + (AHEAD_MS - 1000 << VERSION_SHIFT)


def test_a_folder_that_takes_long_to_list_is_listed_only_for_a_share_of_the_time(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "NUM_CHEAP", 0)
    root, clock, listed = state.trajectories, [1000.0], 0

    def slow_listing(folder: Path) -> list[str]:
        nonlocal listed
        listed += folder == root / "episodes"
        clock[0] += 0.1
        return list_names(folder)

    monkeypatch.setattr(versions, "list_names", slow_listing)
    monkeypatch.setattr(versions.time, "monotonic", lambda: clock[0])
    found = []
    for _ in range(100):
        found.append(next_version(root, "episodes"))
        clock[0] += 0.1
    assert found == sorted(set(found))
    assert 2 <= listed <= 4, "0.2 s each, a twentieth of the time"
    for _ in range(2):  # `a` is an hour ahead already
        put_ahead(state, "b")
    clock[0] += 60.0
    newest = max(file.version for file in map(PartFile.parse, list_names(root / "episodes")) if file)
    assert newest > found[-1]
    assert next_version(root, "episodes") > newest
