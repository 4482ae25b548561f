"""Rows that are queried repeatedly: each file of the store is read once, and the rows are those of a new query."""

import random
from pathlib import Path

import duckdb
import pytest
from episode_samples import make_episode
from replay_samples import group_of, rollout

from osworld_pipeline.domain.episode import Reward
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.part_views import seed_tables
from osworld_pipeline.tables.replay.followed_rows import FollowedRows
from osworld_pipeline.tables.replay.rows import part_views


def follow(connection: duckdb.DuckDBPyConnection, state: StateDir) -> FollowedRows:
    columns, where = "episode_id, task_reward, num_steps", "task_reward >= $least"
    return FollowedRows(connection, state, "episodes", name="own", columns=columns, where=where)


def expected(state: StateDir) -> list[tuple]:
    with part_views(state) as views:
        sql = "SELECT episode_id, task_reward, num_steps FROM episodes WHERE task_reward >= 0.5 ORDER BY ALL"
        return views.execute(sql).fetchall()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    seed_tables(state)
    return state


def test_a_refresh_reads_only_new_files(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for number in range(20):
        store.write_episodes(f"p{number}", [make_episode(f"e{number}", reward=Reward(task=1.0))])
    with duckdb.connect() as connection:
        rows = follow(connection, state)
        assert [rows.refresh({"least": 0.5}) for _ in range(2)] == [20, 0]
        store.write_episodes("p20", [make_episode("e20", reward=Reward(task=1.0))])
        assert rows.refresh({"least": 0.5}) == 1
        compact_store(state, min_parts=1)
        assert [rows.refresh({"least": 0.5}) for _ in range(2)] == [1, 0]
        assert connection.execute("SELECT count(*) FROM own").fetchall() == [(21,)]


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_a_new_query_after_any_rewrite_or_compaction(state: StateDir, seed: int) -> None:
    draw, store = random.Random(seed), TrajectoryStore(state, merge_parts=5)
    with duckdb.connect() as connection:
        rows = follow(connection, state)
        for step in range(12):
            for _ in range(draw.randint(0, 3)):
                part = f"p{draw.randrange(6)}"
                ids = [f"{part}-{index}" for index in range(draw.randint(0, 2))]
                rewards = [Reward(task=draw.choice([0.0, 1.0])) for _ in ids]
                pairs = zip(ids, rewards, strict=True)
                store.write_episodes(part, [make_episode(name, num_steps=step, reward=one) for name, one in pairs])
            if draw.random() < 0.4:
                compact_store(state, min_parts=1, budget_bytes=draw.choice([None, 20_000]), retired_grace_s=0)
            rows.refresh({"least": 0.5})
            found = connection.execute("SELECT episode_id, task_reward, num_steps FROM own ORDER BY ALL").fetchall()
            assert found == expected(state), f"step {step}"


def write_injections(store: TrajectoryStore, part: str, row_ids: list[str]) -> None:
    groups, injections = [], []
    for row_id in row_ids:
        group_id = f"{part}-{row_id}"
        groups.append(group_of(rollout(f"{group_id}-e"), group_id=group_id))
        injections.append(
            Injection(
                injection_id=group_id, group_id=group_id, row_id=row_id, task_id="t", source_dataset="sft_clean",
                reward=1.0, advantage=1.0, weight=1.0,
            )
        )  # fmt: skip
    store.write_groups(part, groups, injections)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_details_are_followed_through_their_head_table(state: StateDir, seed: int) -> None:
    draw, store = random.Random(seed), TrajectoryStore(state, merge_parts=5)
    with duckdb.connect() as connection:
        rows = FollowedRows(connection, state, "injections", name="own", columns="row_id, stage_key", where="true")
        for step in range(12):
            for _ in range(draw.randint(1, 3)):
                write_injections(store, f"p{draw.randrange(6)}", [f"r{step}-{n}" for n in range(draw.randint(0, 3))])
            if draw.random() < 0.4:
                compact_store(state, min_parts=1, budget_bytes=draw.choice([None, 20_000]), retired_grace_s=0)
            rows.refresh({})
            found = connection.execute("SELECT row_id, stage_key FROM own ORDER BY ALL").fetchall()
            with part_views(state) as views:
                assert found == views.execute("SELECT row_id, stage_key FROM injections ORDER BY ALL").fetchall()
            assert rows.refresh({}) == 0
        assert found


def test_a_file_that_cannot_be_read_leaves_the_rows_unchanged(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("p0", [make_episode("e0", reward=Reward(task=1.0))])
    with duckdb.connect() as connection:
        rows = follow(connection, state)
        rows.refresh({"least": 0.5})
        store.write_episodes("p1", [make_episode("e1", reward=Reward(task=1.0))])
        (path,) = (state.trajectories / "episodes").glob("p1~*.parquet")
        whole = path.read_bytes()
        path.write_bytes(b"PAR1")
        for _ in range(2):
            with pytest.raises(duckdb.Error):
                rows.refresh({"least": 0.5})
        assert connection.execute("SELECT episode_id FROM own").fetchall() == [("e0",)]
        path.write_bytes(whole)
        assert rows.refresh({"least": 0.5}) == 1
        assert connection.execute("SELECT count(*) FROM own").fetchall() == [(2,)]
