"""New parts that are written together need one commit; for readers, later writers and after a kill nothing differs."""

import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store.note import RemoteNote, write_note
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, rebuild_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import MANIFEST, take_snapshot
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

ROWS = """
SELECT count(*), count(DISTINCT episode_id), sum(num_steps), (SELECT count(*) FROM steps) FROM episodes
"""
SAMPLES = Path(__file__).parents[2]
"""Folder of the module episode_samples."""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    return state


def parts(*names: str, num_steps: int = 2) -> dict[str, list[Episode]]:
    return {name: [make_episode(name, num_steps=num_steps)] for name in names}


def files(state: StateDir) -> tuple[int, int]:
    """The number of compacted files and of small parts of episodes."""
    found = take_snapshot(state.trajectories, "episodes")
    return len(found.compacted), len(found.small)


def test_new_parts_are_one_file_and_each_is_read_as_it_was_written(state: StateDir) -> None:
    store = TrajectoryStore(state)
    written = {**parts("p2", "p0"), "p1": [make_episode("p1-a", num_steps=0), make_episode("p1-b")], "p3": []}
    store.write_new_parts(written)
    assert files(state) == (1, 0)
    assert store.existing_parts() == ["p0", "p1", "p2"]
    assert store.read_parts(["p0", "p1", "p2"]) == {part: tuple(found) for part, found in written.items() if found}
    assert store.find_episode("p1-b") == make_episode("p1-b")
    assert run_query(state, ROWS).rows == [(4, 4, 6, 6)]


def test_a_single_part_is_written_as_a_small_part(state: StateDir) -> None:
    TrajectoryStore(state).write_new_parts(parts("p0"))
    assert files(state) == (0, 1)


def test_a_part_that_exists_is_replaced_and_never_there_twice(state: StateDir) -> None:
    store, other = TrajectoryStore(state), TrajectoryStore(state)
    store.write_new_parts(parts("p0", "p1"))
    store.write_episodes("p2", [make_episode("p2")])
    other.write_new_parts(parts("p1", "p3", num_steps=3))
    other.write_new_parts(parts("p2", "p4", num_steps=4))
    store.write_new_parts(parts("p3", "p4", num_steps=5))
    assert run_query(state, ROWS).rows == [(5, 5, 2 + 3 + 4 + 5 + 5, 2 + 3 + 4 + 5 + 5)]
    compact_store(state, min_parts=1)
    store.write_new_parts(parts("p0", "p5", num_steps=6))
    assert run_query(state, ROWS).rows == [(6, 6, 6 + 3 + 4 + 5 + 5 + 6, 6 + 3 + 4 + 5 + 5 + 6)]
    assert store.read_episodes("p0") == (make_episode("p0", num_steps=6),)


def test_parts_are_written_one_by_one_while_other_upkeep_runs_and_in_a_cache(state: StateDir) -> None:
    store = TrajectoryStore(state)
    with locked(state.trajectories / "upkeep.lock", timeout_s=1, error=StoreError, what="it"):
        store.write_new_parts(parts("p0", "p1"))
    write_note(state.root, RemoteNote(url="s3://bucket/prefix", role="cache"))
    store.write_new_parts(parts("p2", "p3"))
    assert files(state) == (0, 4)


def test_parts_are_written_one_by_one_where_the_manifest_is_damaged(
    state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    store = TrajectoryStore(state)
    store.write_new_parts(parts("p0", "p1"))
    (state.trajectories / MANIFEST).write_bytes(b"{")
    store.write_new_parts(parts("p2", "p3"))
    assert "2 parts" in caplog.text
    assert "is damaged" in caplog.text
    rebuild_store(state)
    assert run_query(state, ROWS).rows == [(4, 4, 8, 8)]


def test_a_bad_name_and_an_episode_in_two_parts_are_refused(state: StateDir) -> None:
    store = TrajectoryStore(state)
    with pytest.raises(StoreError, match=r"'\.\./x' cannot name a part"):
        store.write_new_parts(parts("p0", "../x"))
    with pytest.raises(StoreError, match="episode p0 twice"):
        store.write_new_parts({"p0": [make_episode("p0")], "p1": [make_episode("p0")]})
    assert files(state) == (0, 0)


def test_a_writer_of_many_groups_leaves_few_files_and_finds_each_part_again(state: StateDir) -> None:
    store = TrajectoryStore(state, merge_parts=8)
    names = [f"p{number:03d}" for number in range(120)]
    for first in range(0, len(names), 3):
        store.write_new_parts(parts(*names[first : first + 3]))
        assert files(state)[0] <= 16
    assert store.existing_parts() == names
    assert run_query(state, ROWS).rows == [(120, 120, 240, 240)]
    store.write_new_parts(parts("p000", "p999", num_steps=3))
    assert run_query(state, ROWS).rows == [(121, 121, 244, 244)]


KILLED = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(SAMPLES)!r})
from episode_samples import make_episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore

left, replace = [int(sys.argv[2])], os.replace

def replace_or_die(*paths):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    replace(*paths)

store = TrajectoryStore(StateDir(Path(sys.argv[1])))
os.replace = replace_or_die
store.write_new_parts({{name: [make_episode(name, num_steps=2)] for name in ("p1", "p2")}})
"""


def test_a_kill_at_any_rename_leaves_all_parts_or_none_and_the_next_write_works(
    state: StateDir, tmp_path_factory: pytest.TempPathFactory
) -> None:
    TrajectoryStore(state).write_new_parts(parts("p0", "p9"))
    killed_with = []
    for number in count():
        copy = StateDir(shutil.copytree(state.root, tmp_path_factory.mktemp("killed") / "var"))
        code = subprocess.run([sys.executable, "-c", KILLED, str(copy.root), str(number)], timeout=60).returncode
        rebuild_catalog(copy)
        rows = run_query(copy, ROWS).rows
        assert rows in ([(2, 2, 4, 4)], [(4, 4, 8, 8)])
        is_lost = number % 2 == 1
        if is_lost:  # files that were written without their commit may count after that
            (copy.trajectories / MANIFEST).unlink()
            rebuild_store(copy)
        TrajectoryStore(copy).write_new_parts(parts("p1", "p2", "p3", num_steps=3))
        for path in copy.trajectories.rglob("*.parquet"):
            os.utime(path, (0, 0))
        collect_garbage(copy, retired_grace_s=0)
        compact_store(copy, min_parts=1, retired_grace_s=0)
        assert run_query(copy, ROWS).rows == [(5, 5, 13, 13)]
        if code != -signal.SIGKILL:
            assert code == 0
            break
        killed_with.append(rows[0][0])
    assert killed_with == [2, 2, 2, 2, 2], "two manifests and three tables"
