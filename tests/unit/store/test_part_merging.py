"""Small parts are merged by their writers, within bounds, and no reader sees a difference."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.atomic_io import locked
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store.note import RemoteNote, write_note
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore, merging
from osworld_pipeline.store.compaction_plan import FAN_IN, Choice, Unit, choose_some
from osworld_pipeline.store.merging import LEFT_PARTS, merge_parts, num_small_parts
from osworld_pipeline.store.part_files import COMPACTED, MANIFEST, PartFile, take_snapshot
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

MIB = 1 << 20
TORN = """
SELECT count(*) FROM episodes e FULL JOIN (SELECT episode_id, count(*) AS n FROM steps GROUP BY 1) s USING (episode_id)
WHERE e.num_steps IS DISTINCT FROM s.n
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    return state


def num_small(state: StateDir) -> int:
    return len(take_snapshot(state.trajectories, "episodes").small)


def test_a_writer_of_one_part_per_episode_leaves_few_small_parts_and_finds_each_again(state: StateDir) -> None:
    store = TrajectoryStore(state, merge_parts=6)
    names = [f"eval-c-{number:03d}" for number in range(30)]
    for name in names:
        store.write_episodes(name, [make_episode(name)])
        assert num_small(state) <= 6
    assert sorted(store.read_parts(names)) == names == store.existing_parts(prefix="eval-")
    assert store.find_episode(names[7]) == make_episode(names[7])
    assert run_query(state, "SELECT count(*), count(DISTINCT episode_id) FROM episodes").rows == [(30, 30)]
    assert run_query(state, TORN).rows == [(0,)]


def test_a_writer_counts_the_small_parts_only_before_and_after_each_merge(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def count(root: Path, head: str) -> int:
        counted.append(head)
        return num_small_parts(root, head)

    monkeypatch.setattr(merging, "num_small_parts", count)
    store = TrajectoryStore(state, merge_parts=8)
    for number in range(40):
        store.write_episodes(f"p{number:02d}", [make_episode(f"p{number:02d}")])
    assert len(counted) <= 2 * 40 // 8 + 1, "before and after each merge"
    assert num_small(state) <= 8


def test_a_part_that_is_merged_and_written_again_counts_once(state: StateDir) -> None:
    store = TrajectoryStore(state, merge_parts=3)
    for round_ in range(1, 4):
        for number in range(5):
            store.write_episodes(f"p{number}", [make_episode(f"p{number}", num_steps=round_)])
        assert run_query(state, "SELECT count(*), sum(num_steps) FROM episodes").rows == [(5, 5 * round_)]
        assert store.find_episode("p4") == make_episode("p4", num_steps=round_)


def test_an_episode_without_a_step_is_found_in_compacted_files(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("p0", [make_episode("p0", num_steps=0)])
    compact_store(state, min_parts=1)
    assert store.find_episode("p0") == make_episode("p0", num_steps=0)
    assert list(store.read_parts(["p0", "p1"])) == ["p0"]


def test_a_writer_continues_while_other_upkeep_holds_the_store(state: StateDir) -> None:
    store = TrajectoryStore(state, merge_parts=2)
    with locked(state.trajectories / "upkeep.lock", timeout_s=1, error=StoreError, what="it"):
        for number in range(5):
            store.write_episodes(f"p{number}", [make_episode(f"p{number}")])
        assert num_small(state) == 5
        assert merge_parts(state.trajectories, min_parts=1) is None


def test_a_store_that_cannot_be_compacted_fails_no_writer(state: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    store = TrajectoryStore(state, merge_parts=2)
    store.write_episodes("p0", [make_episode("p0")])
    (head,) = (state.trajectories / "steps").glob("p0~*.parquet")
    head.write_bytes(b"PAR1")
    for number in range(1, 4):
        store.write_episodes(f"p{number}", [make_episode(f"p{number}")])
    assert "are not merged" in caplog.text
    assert "is damaged" in caplog.text
    (state.trajectories / MANIFEST).write_bytes(b"{")
    store.write_episodes("p9", [make_episode("p9")])


def unit(name: str, mib: float, *, is_part: bool = False) -> Unit:
    head = Path("episodes") / (f"{name}.parquet" if is_part else f"{COMPACTED}/{name}")
    part = PartFile(part=name, version=1, name=head.name) if is_part else None
    return Unit(head=head, details={}, part=part, num_bytes=int(mib * MIB))


def choose(small: list[Unit], compacted: list[Unit], *, budget_mib: float = 256, **replaces: set[str]) -> Choice:
    return choose_some(
        small, compacted, replaces, min_parts=2, target_bytes=64 * MIB, budget_bytes=int(budget_mib * MIB)
    )


def test_a_budget_bounds_what_is_read() -> None:
    parts = [unit(f"p{number}", 1, is_part=True) for number in range(10)]
    assert len(choose(parts, [], budget_mib=4).small) == 4
    files = [unit(f"g{number}", 20) for number in range(FAN_IN)]
    choice = choose([], files, budget_mib=100)
    assert sum(one.num_bytes for one in choice.merged) <= 100 * MIB
    assert len(choice.merged) == 5


def test_a_part_is_merged_together_with_the_files_whose_rows_it_replaces_or_not_at_all() -> None:
    parts, files = [unit(name, 1, is_part=True) for name in "abc"], [unit("g", 60)]
    whole = choose(parts, files, a={"g"})
    assert {one.head.name for one in whole.merged} == {"g"}
    assert len(whole.small) == 3
    bounded = choose(parts, files, budget_mib=50, a={"g"})
    assert [one.part.part for one in bounded.small if one.part] == ["b", "c"]
    assert bounded.merged == ()


def test_each_row_is_rewritten_a_few_times_and_files_stay_few() -> None:
    """2,000 merges of 0.2 MiB each."""
    files: list[Unit] = []
    written = 0.0
    for number in range(2_000):
        choice = choose([unit(f"p{number}-{half}", 0.1, is_part=True) for half in range(2)], files)
        made = sum(one.num_bytes for one in (*choice.small, *choice.merged))
        written += made
        merged = {one.head for one in choice.merged}
        files = [*(one for one in files if one.head not in merged), unit(f"g{number}", made / MIB)]
    total = sum(one.num_bytes for one in files)
    assert abs(total - 400 * MIB) < MIB
    assert written < 5 * total
    assert sum(one.num_bytes < 32 * MIB for one in files) <= 3 * (FAN_IN - 1)
    assert len(files) < 20


def test_compaction_with_a_budget_gives_the_same_rows_in_several_runs(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for number in range(12):
        store.write_episodes(f"p{number:02d}", [make_episode(f"p{number:02d}-e{index}") for index in range(2)])
    before = run_query(state, "FROM episodes ORDER BY episode_id").rows
    size = sum(path.stat().st_size for path in state.trajectories.glob("*/p00~*.parquet"))
    for _ in range(4):
        assert compact_store(state, min_parts=1, budget_bytes=4 * size + size // 2).num_parts <= 5
        rows = run_query(state, "FROM episodes ORDER BY episode_id").rows
        assert rows == before
    assert num_small(state) == 0
    assert compact_store(state, min_parts=1, budget_bytes=4 * size).num_parts == 0


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from episode_samples import make_episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
store = TrajectoryStore(StateDir(Path(sys.argv[1])), merge_parts=3)
for number in range(int(sys.argv[2]), 1000):
    store.write_episodes(f"p{number:03d}", [make_episode(f"p{number:03d}")])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_while_it_writes_or_merges_loses_nothing_that_was_acknowledged(state: StateDir) -> None:
    first = 0
    for round_ in range(3):
        samples = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", WRITER, str(state.root), str(first), samples]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(3 + 2 * round_):
                first = int(writer.stdout.readline()) + 1
            writer.send_signal(signal.SIGKILL)
            acknowledged = [int(line) for line in writer.stdout]
        first = max([first, *(number + 1 for number in acknowledged)])
        store = TrajectoryStore(state)
        known = store.read_parts(store.existing_parts())
        names = [f"p{number:03d}" for number in range(first)]
        assert [known[name] for name in names] == [(make_episode(name),) for name in names]
        assert len(known) <= first + 1, "at most the one that was being written"
        assert run_query(state, "SELECT count(*) - count(DISTINCT episode_id) FROM episodes").rows == [(0,)]
        assert run_query(state, TORN).rows == [(0,)]
    assert take_snapshot(state.trajectories, "episodes").compacted


def test_small_parts_of_a_cache_of_an_object_store_stay_unchanged(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for number in range(LEFT_PARTS):
        store.write_episodes(f"p{number}", [make_episode(f"e{number}")])
    write_note(state.root, RemoteNote(url="s3://bucket/prefix", role="cache"))
    assert merge_parts(state.trajectories) is None
    assert num_small(state) == LEFT_PARTS
