"""The index follows the store: new parts, rewritten parts, compaction, and parts that cannot be read."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode
from viewer_samples import BASE, GSPO, SFT, TASKS, checkpoint_row, write_suite

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.compaction import compact_parts
from osworld_pipeline.tables.owned import table_path, write_table
from osworld_pipeline.web.viewer.index import EpisodeIndex


def known(index: EpisodeIndex, sql: str = "SELECT episode_id FROM facts ORDER BY episode_id") -> list[tuple]:
    index.refresh(at_once=True)
    with index.reading() as reader:
        return reader.rows(sql)


def make_index(tmp_path: Path) -> tuple[TrajectoryStore, EpisodeIndex]:
    state = StateDir(tmp_path / "var")
    return TrajectoryStore(state), EpisodeIndex(state)


def test_empty_state_folder_has_no_episodes_and_none_is_made_in_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "nothing")
    assert known(EpisodeIndex(state)) == []
    assert not state.root.exists()


def test_a_new_part_is_seen_and_a_rewritten_part_replaces_its_rows(tmp_path: Path) -> None:
    store, index = make_index(tmp_path)
    store.write_episodes("a", [make_episode("e1"), make_episode("e2")])
    assert known(index) == [("e1",), ("e2",)]
    store.write_episodes("b", [make_episode("e3")])
    store.write_episodes("a", [make_episode("e1", seed=5)])
    assert known(index, "SELECT episode_id, seed FROM facts ORDER BY 1") == [("e1", 5), ("e3", 0)]


def test_compaction_changes_files_and_not_the_content_of_the_index(own_state: StateDir) -> None:
    index = EpisodeIndex(own_state)
    sql = "SELECT * EXCLUDE (file, is_compacted) FROM facts ORDER BY episode_id"
    groups = "SELECT * EXCLUDE (file, is_compacted) FROM grouped ORDER BY group_id"
    joined = "SELECT * EXCLUDE (file, is_compacted) FROM injected ORDER BY group_id"
    before = [known(index, question) for question in (sql, groups, joined)]
    assert len(before[0]) > 30
    assert len(before[2]) == 1
    compact_parts(own_state.trajectories, min_parts=1)
    assert [known(index, question) for question in (sql, groups, joined)] == before
    assert known(index, "SELECT DISTINCT is_compacted FROM facts") == [(True,)]
    assert [known(EpisodeIndex(own_state), question) for question in (sql, groups, joined)] == before


def test_a_part_rewritten_after_its_compaction_hides_the_compacted_rows(tmp_path: Path) -> None:
    store, index = make_index(tmp_path)
    store.write_episodes("a", [make_episode("e1"), make_episode("e2")])
    compact_parts(store.root, min_parts=1)
    assert len(known(index)) == 2
    store.write_episodes("a", [make_episode("e1", seed=9)])
    assert known(index, "SELECT episode_id, seed FROM facts") == [("e1", 9)]
    assert known(EpisodeIndex(StateDir(tmp_path / "var"))) == [("e1",)]


def test_a_damaged_part_is_reported_and_the_indexed_rows_stay(tmp_path: Path) -> None:
    store, index = make_index(tmp_path)
    store.write_episodes("a", [make_episode("e1")])
    known(index)
    store.write_episodes("b", [make_episode("e2")])
    (head,) = (store.root / "episodes").glob("b~*.parquet")
    head.write_bytes(b"no parquet")
    assert known(index) == [("e1",)]
    assert "b~" in index.problem
    head.unlink()
    assert known(index) == [("e1",)]
    assert index.problem == ""


def test_store_that_cannot_be_read_from_the_start_is_an_error(tmp_path: Path) -> None:
    store, index = make_index(tmp_path)
    store.write_episodes("a", [make_episode("e1")])
    (store.root / "compacted.json").write_text("{")
    with pytest.raises(StoreError, match="cannot read the store"):
        index.refresh()


def test_reading_writes_nothing(own_state: StateDir) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in own_state.root.rglob("*"))
    index = EpisodeIndex(own_state)
    known(index)
    assert sorted((path, path.stat().st_mtime_ns) for path in own_state.root.rglob("*")) == before


def test_stage_of_a_training_episode_is_known_before_its_checkpoint_is(own_state: StateDir) -> None:
    index = EpisodeIndex(own_state)
    sql = "SELECT DISTINCT stage FROM facts WHERE purpose = 'train'"
    write_table(own_state, "checkpoints", [checkpoint_row(BASE, "base", None), checkpoint_row(SFT, "sft", BASE)])
    assert known(index, sql) == [("gspo_phase1",)]
    write_table(own_state, "checkpoints", [checkpoint_row(GSPO, "gspo_phase2", SFT)])
    assert known(index, sql) == [("gspo_phase2",)]


def test_instruction_follows_the_table_of_tasks(own_state: StateDir) -> None:
    index = EpisodeIndex(own_state)
    sql = "SELECT count(DISTINCT instruction) FROM facts"
    assert known(index, sql) == [(6,)]
    path = table_path(own_state, "union_tasks")
    task = pq.read_table(path).to_pylist()[0]["task_id"]
    write_table(own_state, "union_tasks", [{"task_id": task, "instruction": "Something else."}])
    os.utime(path)
    assert ("Something else.",) in known(index, "SELECT DISTINCT instruction FROM facts")


def test_a_task_of_a_users_suite_has_its_instruction_and_follows_the_file(own_state: StateDir) -> None:
    TrajectoryStore(own_state).write_episodes("mine", [make_episode("m", task_id="notes"), make_episode("n")])
    index = EpisodeIndex(own_state)
    sql = "SELECT instruction FROM facts WHERE episode_id = 'm'"
    assert known(index, sql) == [(None,)]
    path = write_suite(own_state, "mine", notes="Make a folder.", other="Something.")
    assert known(index, sql) == [("Make a folder.",)]
    write_suite(own_state, "mine", notes="Make a new folder.")
    os.utime(path, ns=(1, 1))
    assert known(index, sql) == [("Make a new folder.",)]
    write_suite(own_state, "mine", **{TASKS[0][0]: "Not what the table says."})
    os.utime(path, ns=(2, 2))
    assert known(index, f"SELECT DISTINCT instruction FROM facts WHERE task_id = '{TASKS[0][0]}'") == [(TASKS[0][2],)]


def test_no_refresh_fails_while_parts_are_written_again_and_compacted(tmp_path: Path) -> None:
    store, index = make_index(tmp_path)
    seen: list[int] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            seen.append(len(known(index)))
            assert index.problem == ""
        seen.append(len(known(index)))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for number in range(24):
            store.write_episodes(f"part-{number % 16:02d}", [make_episode(f"e{number % 16}", seed=number)])
            if number % 8 == 7:
                compact_parts(store.root, min_parts=1)
        is_over.set()
        looking.result(60)
    assert seen == sorted(seen)
    assert seen[-1] == 16
    assert known(index, "SELECT min(seed), max(seed) FROM facts") == [(8, 23)]
