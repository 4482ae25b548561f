"""Compaction and garbage collection: fewer files, the same rows, and nothing removed that is still needed."""

import os
import re
import shutil
import threading
import time
from pathlib import Path

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode, make_step

from osworld_pipeline.atomic_io import locked, write_file, write_parquet
from osworld_pipeline.columns import SCHEMA_KEY, SCHEMA_VERSION, stored
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.upkeep.migrate import migrate_state
from osworld_pipeline.runs.upkeep.upkeep import collect_garbage, compact_store, missing_blobs
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.store.compaction import compact_parts
from osworld_pipeline.store.format_note import NOTE
from osworld_pipeline.store.part_files import COMPACTED, MANIFEST, take_snapshot
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.tables.query import run_query

TORN = """
SELECT count(*) FROM episodes e
FULL JOIN (SELECT episode_id, count(*) AS n FROM steps GROUP BY 1) s USING (episode_id)
FULL JOIN (SELECT episode_id, sum(len(image_steps)) AS n FROM sequences GROUP BY 1) q USING (episode_id)
WHERE e.num_steps IS DISTINCT FROM s.n OR e.num_images IS DISTINCT FROM q.n
"""
COUNTS = "SELECT count(*), count(DISTINCT episode_id), sum(num_steps) FROM episodes"
OLD_S = 1_000_000


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    return state


@pytest.fixture
def store(state: StateDir) -> TrajectoryStore:
    store = TrajectoryStore(state)
    for part in range(4):
        store.write_episodes(f"p{part}", [make_episode(f"p{part}-e{index}") for index in range(3)])
    return store


def counts(state: StateDir) -> tuple:
    """The counts that our own queries and a plain client see; they must be the same."""
    row = run_query(state, COUNTS).rows[0]
    assert run_query(state, TORN).rows == [(0,)]
    assert ask_plainly(state, COUNTS, TORN) == [[row], [(0,)]]
    return row


def ask_plainly(state: StateDir, *questions: str) -> list[list[tuple]]:
    with duckdb.connect(str(state.catalog), read_only=True) as connection:
        return [connection.execute(sql).fetchall() for sql in questions]


def part_files(state: StateDir) -> list[str]:
    return sorted(path.name for path in state.trajectories.glob("*/*.parquet") if not path.name.startswith("_"))


def age(path: Path) -> None:
    os.utime(path, (time.time() - OLD_S, time.time() - OLD_S))


def test_compacted_parts_read_as_before_and_their_files_go_after_the_grace(
    state: StateDir, store: TrajectoryStore
) -> None:
    before = store.read_parts(store.existing_parts())
    summary = compact_store(state, min_parts=2)
    assert (summary.num_parts, summary.num_written, summary.num_rows) == (4, 1, 12)
    assert len(part_files(state)) == 12
    assert counts(state) == (12, 12, 24)
    assert compact_store(state, min_parts=2, retired_grace_s=0).num_removed == 4
    assert part_files(state) == []
    assert counts(state) == (12, 12, 24)
    assert store.read_parts(store.existing_parts()) == before
    assert store.find_episode("p2-e1") == make_episode("p2-e1")


def test_a_part_written_again_after_its_compaction_replaces_its_rows(state: StateDir, store: TrajectoryStore) -> None:
    compact_store(state, min_parts=2)
    again = make_episode("p1-e0", num_steps=5)
    for _ in range(2):
        store.write_episodes("p1", [again])
        assert store.read_episodes("p1") == (again,)
        assert store.find_episode("p1-e0") == again
        with pytest.raises(StoreError, match="no episode"):
            store.find_episode("p1-e1")
        assert counts(state) == (10, 10, 23)
        assert compact_store(state, min_parts=99, retired_grace_s=0).num_merged == 1
        assert counts(state) == (10, 10, 23)
        assert store.read_episodes("p1") == (again,)


def test_a_notebook_that_opens_the_catalog_by_itself_sees_the_same_rows_and_opens_no_retired_file(
    state: StateDir, store: TrajectoryStore
) -> None:
    compact_store(state, min_parts=2)
    for path in state.trajectories.glob("*/p*.parquet"):
        path.write_bytes(b"retired")
    store.write_episodes("p1", [make_episode("p1-e0", num_steps=5)])
    store.write_episodes("p1", [make_episode("p1-e0", num_steps=4)])
    assert counts(state) == (10, 10, 22)


def test_a_notebook_that_listed_the_files_before_a_compaction_reads_what_it_listed(
    state: StateDir, store: TrajectoryStore
) -> None:
    """DuckDB lists folders when it plans a query, and reads the manifest later."""
    compact_parts(state.trajectories, min_parts=2)
    store.write_episodes("p1", [make_episode("p1-e0", num_steps=5)])
    store.write_episodes("p9", [make_episode("p9-e0")])
    for path in state.trajectories.glob(f"*/{COMPACTED}/g000001*.parquet"):
        path.rename(state.root / f"later-{path.parent.parent.name}")
    assert ask_plainly(state, COUNTS, TORN) == [[(11, 11, 25)], [(0,)]]
    manifest = orjson.loads((state.trajectories / MANIFEST).read_bytes())
    (state.trajectories / MANIFEST).write_bytes(orjson.dumps({**manifest, "retired_in": {}}))
    with pytest.raises(duckdb.Error, match="a file that the manifest names is gone"):
        ask_plainly(state, COUNTS)


def test_a_notebook_opens_no_file_that_was_retired_before_the_last_rebuild(
    state: StateDir, store: TrajectoryStore
) -> None:
    compact_store(state, min_parts=2)
    patient = TrajectoryStore(state, merge_parts=1_000)
    for number in range(60):  # so many live files that DuckDB does not turn the join into a list of names
        patient.write_episodes(f"q{number}", [make_episode(f"q{number}")])
    with duckdb.connect(str(state.catalog), read_only=True) as connection:
        for table in ("episodes", "steps"):
            ((_, plan),) = connection.execute(f"EXPLAIN ANALYZE SELECT count(*) FROM {table}").fetchall()
            num_opened = re.findall(r"READ_PARQUET.*?Total Files Read: (\d+)", plan, re.DOTALL)
            assert num_opened == ["61"], "the compacted file and the new ones"


def test_a_notebook_refuses_a_manifest_that_is_older_than_the_catalog(state: StateDir, store: TrajectoryStore) -> None:
    """Otherwise it would skip files that this manifest counts as live."""
    earlier = {path: path.read_bytes() for path in state.trajectories.rglob("*") if path.is_file()}
    compact_store(state, min_parts=2)
    shutil.rmtree(state.trajectories)
    for path, data in earlier.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(duckdb.Error, match="missing or old: run osworld-pipeline rebuild-catalog --state"):
        ask_plainly(state, COUNTS)
    rebuild_catalog(state)
    assert counts(state) == (12, 12, 24)


def test_a_look_up_skips_files_that_have_smaller_and_larger_ids_but_not_its_own(
    state: StateDir, store: TrajectoryStore
) -> None:
    compact_store(state, min_parts=2)
    for part in range(2):
        store.write_episodes(f"q{part}", [make_episode("a"), make_episode(f"q{part}"), make_episode("z")][part:])
    compact_store(state, min_parts=2, target_bytes=1)
    files = [str(path) for path in (state.trajectories / "episodes" / COMPACTED).glob("g*.parquet")]
    assert len(files) > 1
    with duckdb.connect() as connection:
        sql = "EXPLAIN ANALYZE SELECT * FROM read_parquet(?) WHERE episode_id = 'p2-e1'"
        ((_, plan),) = connection.execute(sql, [files]).fetchall()
    assert re.findall(r"Row Groups Scanned: \d+ / \d+", plan) == [f"Row Groups Scanned: 1 / {len(files)}"]


def test_a_notebook_without_the_manifest_gets_an_error_that_says_what_to_run(
    state: StateDir, store: TrajectoryStore
) -> None:
    compact_store(state, min_parts=2)
    (state.trajectories / MANIFEST).unlink()
    with pytest.raises(duckdb.Error, match="missing or old: run osworld-pipeline rebuild-catalog --state"):
        ask_plainly(state, COUNTS)


def test_groups_and_their_injections_are_compacted_together(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for number in range(3):
        group = RolloutGroup(group_id=f"g{number}", task_id="t", stage_key="s", update=number, episodes=())
        injection = Injection(
            injection_id=f"i{number}", group_id=f"g{number}", row_id="r", task_id="t", source_dataset="x",
            reward=1.0, advantage=1.0, weight=1.0,
        )  # fmt: skip
        store.write_groups(f"u{number}", [group], [injection])
    compact_store(state, min_parts=2, retired_grace_s=0)
    compact_store(state, min_parts=2, retired_grace_s=0)
    joined = "SELECT i.injection_id FROM injections i JOIN rollout_groups g USING (group_id) ORDER BY 1"
    assert run_query(state, joined).rows == [("i0",), ("i1",), ("i2",)]


def test_files_grow_to_the_target_and_are_sorted_by_id(state: StateDir, store: TrajectoryStore) -> None:
    assert compact_store(state, min_parts=1, target_bytes=1).num_written == 4
    assert compact_store(state, min_parts=1).num_parts == 0
    store.write_episodes("p9", [make_episode("p9-e0")])
    assert compact_store(state, min_parts=1).num_merged == 4
    (name,) = take_snapshot(state.trajectories, "episodes").compacted
    ids = pq.read_table(state.trajectories / "episodes" / COMPACTED / name)["episode_id"].to_pylist()
    assert ids == sorted(ids)
    assert len(ids) == 13


def write_with_fewer_columns(state: StateDir, part: str, episode_id: str) -> None:
    """Writes as an older program does: fewer columns, and a narrower type."""
    left_out = ["processor_digest", "reward_parts", "source_dataset", "earlier_faults", "dialect", "parity_num_tokens"]
    head = stored("episodes").empty_table().drop_columns(left_out)
    steps = stored("steps").empty_table().drop_columns(["screenshot_num_bytes"])
    narrow = steps.schema.set(steps.schema.get_field_index("coordinate_x"), pa.field("coordinate_x", pa.int32()))
    placed = {"part": part, "part_version": 7, "episode_id": episode_id}
    row = placed | {
        "task_id": "t", "purpose": "train", "outcome": "success", "num_steps": 1, "context_mode": "append",
        "stop": [], "times_s": [], "run_ids": [],
        "is_valid": True, "is_success": True, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4,
        "sampling_seed": 0, "attempt": 0,
    }  # fmt: skip
    step = placed | {"step_index": 0, "coordinate_x": 7, "coordinate_y": 8, "policy_version": 7}
    name = f"{part}~{7:016x}-abcdef.parquet"
    write_parquet(state.trajectories / "steps" / name, pa.Table.from_pylist([step], schema=narrow))
    write_parquet(state.trajectories / "episodes" / name, pa.Table.from_pylist([row], schema=head.schema))


def test_parts_of_an_older_program_are_migrated_replaced_and_compacted(state: StateDir, store: TrajectoryStore) -> None:
    write_with_fewer_columns(state, "old", "old-e0")
    write_with_fewer_columns(state, "older", "older-e0")
    write_file(state.trajectories / NOTE, b'{"format": 1}')
    assert migrate_state(state).parts.num_without_sequences == 2
    store = TrajectoryStore(state)
    assert counts(state) == (14, 14, 26)
    look = "SELECT coordinate_x, screenshot_num_bytes, typeof(coordinate_x) FROM steps WHERE episode_id LIKE 'old%'"
    assert run_query(state, look).rows == [(7, None, "BIGINT")] * 2
    (old,) = store.read_episodes("old")
    assert (old.steps[0].signals.coordinate, old.steps[0].screenshot_num_bytes) == ((7, 8), 0)
    assert (old.processor_digest, old.dialect, old.parity, old.earlier_faults) == ("", "", None, ())
    store.write_episodes("old", [make_episode("old-e0", num_steps=3)])
    assert counts(state) == (14, 14, 28)
    compact_store(state, min_parts=2)
    compact_store(state, min_parts=2, retired_grace_s=0)
    assert counts(state) == (14, 14, 28)
    assert store.read_episodes("older")[0].processor_digest == ""
    collect_garbage(state, retired_grace_s=0, grace_s=-1)
    assert part_files(state) == []


def test_a_part_without_a_version_is_refused_and_not_skipped(state: StateDir, store: TrajectoryStore) -> None:
    (head,) = (state.trajectories / "episodes").glob("p1~*.parquet")
    head.rename(head.with_name("p1.parquet"))
    for read in (lambda: store.read_episodes("p2"), lambda: counts(state), lambda: compact_store(state, min_parts=2)):
        with pytest.raises(StoreError, match=r"p1\.parquet has no version in its name"):
            read()


def test_a_part_of_a_newer_program_reads_and_is_left_alone(state: StateDir, store: TrajectoryStore) -> None:
    (head,) = (state.trajectories / "episodes").glob("p1~*.parquet")
    table = pq.read_table(head)
    table = table.append_column("of_tomorrow", pa.array([1] * table.num_rows, pa.int32()))
    metadata = {SCHEMA_KEY: str(SCHEMA_VERSION + 1).encode()}
    write_parquet(head, table.replace_schema_metadata(metadata))
    assert compact_store(state, min_parts=2).num_newer == 1
    assert counts(state) == (12, 12, 24)
    assert len(store.read_episodes("p1")) == 3


def as_of_tomorrow(path: Path, *, has_version: bool = True) -> None:
    """Writes as a newer program does: one more column, and mostly a newer version of the schema."""
    table = pq.ParquetFile(path).read()
    table = table.append_column("of_tomorrow", pa.array([1] * table.num_rows, pa.int32()))
    version = str(SCHEMA_VERSION + has_version).encode()
    write_parquet(path, table.replace_schema_metadata({SCHEMA_KEY: version}))


@pytest.mark.parametrize("has_version", [True, False])
@pytest.mark.parametrize("table", ["episodes", "steps"])
def test_a_compacted_file_of_a_newer_program_keeps_its_columns(
    state: StateDir, store: TrajectoryStore, table: str, has_version: bool
) -> None:
    compact_store(state, min_parts=2, retired_grace_s=0)
    (name,) = take_snapshot(state.trajectories, "episodes").compacted
    path = state.trajectories / table / COMPACTED / name
    as_of_tomorrow(path, has_version=has_version)
    before = path.read_bytes()
    store.write_episodes("p1", [make_episode("p1-e0", num_steps=5)])
    store.write_episodes("p9", [make_episode("p9-e0")])
    summary = compact_store(state, min_parts=1, retired_grace_s=0)
    assert (summary.num_parts, summary.num_merged, summary.num_newer) == (1, 0, 1)
    for _ in range(2):
        assert counts(state) == (11, 11, 25)
        compact_store(state, min_parts=1, retired_grace_s=0)
        collect_garbage(state, retired_grace_s=0, grace_s=-1)
    assert path.read_bytes() == before


def test_a_small_part_with_a_column_of_its_own_is_left_alone(state: StateDir, store: TrajectoryStore) -> None:
    (steps,) = (state.trajectories / "steps").glob("p1~*.parquet")
    as_of_tomorrow(steps, has_version=False)
    assert compact_store(state, min_parts=2).num_newer == 1
    assert counts(state) == (12, 12, 24)


def test_every_file_says_its_schema_version(state: StateDir, store: TrajectoryStore) -> None:
    compact_store(state, min_parts=2)
    for path in state.trajectories.rglob("*.parquet"):
        assert pq.read_metadata(path).metadata[SCHEMA_KEY] == str(SCHEMA_VERSION).encode(), path


def test_a_second_upkeep_at_the_same_time_is_one_clear_error(state: StateDir, store: TrajectoryStore) -> None:
    lock = state.trajectories / "upkeep.lock"
    with (
        locked(lock, timeout_s=1, error=StoreError, what="it"),
        pytest.raises(StoreError, match=f"the upkeep of the trajectories has been locked by process {os.getpid()}"),
    ):
        compact_store(state)


def test_a_damaged_manifest_is_named(state: StateDir, store: TrajectoryStore) -> None:
    (state.trajectories / MANIFEST).write_bytes(b"{")
    with pytest.raises(StoreError, match=r"compacted.json is damaged"):
        store.existing_parts()


def test_files_left_over_by_a_killed_writer_are_removed_and_live_files_stay(
    state: StateDir, store: TrajectoryStore
) -> None:
    store.write_episodes("p1", [make_episode("p1-e0")])
    (head,) = (state.trajectories / "episodes").glob("p2~*.parquet")
    head.unlink()
    for path in state.trajectories.rglob("*.parquet"):
        age(path)
    dry = collect_garbage(state, retired_grace_s=0, is_dry_run=True)
    assert dry.num_part_files == 5  # the first write of p1, its details, and those of p2
    assert collect_garbage(state, retired_grace_s=0) == dry
    assert counts(state) == (7, 7, 14)


def test_only_old_images_that_no_row_names_are_removed(state: StateDir) -> None:
    store = TrajectoryStore(state)
    used, replayed, unused, fresh = (store.write_blob(name, suffix="png") for name in (b"1", b"2", b"3", b"4"))
    for sha256 in (used, replayed, unused):
        age(store.blobs.path(sha256, suffix="png"))
    store.write_episodes("a", [make_episode("e1", steps=(make_step(sha256=used),))])
    write_table(state, "replay_buffer", [{"row_id": "r", "images": [replayed]}])
    assert collect_garbage(state, is_dry_run=True).num_images == 1
    store.read_blob(unused)
    done = collect_garbage(state)
    assert (done.num_images, done.image_bytes) == (1, 1)
    for sha256 in (used, replayed, fresh):
        store.read_blob(sha256)
    with pytest.raises(StoreError, match="is not in"):
        store.read_blob(unused)


def test_a_file_that_cannot_be_read_stops_the_collection(state: StateDir) -> None:
    store = TrajectoryStore(state)
    age(store.blobs.path(store.write_blob(b"1", suffix="png"), suffix="png"))
    (state.trajectories / "steps" / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=r"torn.parquet is damaged .* so its references are unknown"):
        collect_garbage(state)
    assert len(list(store.blobs.list())) == 1


def test_a_missing_image_is_reported_with_the_file_that_names_it(state: StateDir) -> None:
    store = TrajectoryStore(state)
    there, gone = store.write_blob(b"1", suffix="png"), digest_bytes(b"2")
    store.write_episodes("a", [make_episode("e1", steps=(make_step(sha256=there), make_step(1, sha256=gone)))])
    found = missing_blobs(state)
    assert list(found) == [gone]
    assert found[gone].parent.name == "steps"


def test_an_image_written_again_is_never_collected(state: StateDir) -> None:
    """A writer adds old images again while the collector runs: an image is there once its write has returned."""
    blobs = BlobStore(state.blobs)
    images = [str(number).encode() for number in range(60)]
    lost: list[bytes] = []
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            collect_garbage(state, grace_s=100)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for image in images:
                sha256 = blobs.write(image, suffix="png")
                if blobs.read(sha256) != image:
                    lost.append(image)
                age(blobs.path(sha256, suffix="png"))
    finally:
        ended.set()
        collector.join()
    assert lost == []


def test_a_batch_of_images_is_stored_in_order(state: StateDir) -> None:
    images = [(str(number).encode(), "png") for number in range(40)]
    names = BlobStore(state.blobs).write_many([*images, images[0]])
    assert names == [digest_bytes(data) for data, _ in [*images, images[0]]]
