"""An episode that a person touched is counted nowhere and keeps its mark; older episodes without a mark still load."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from episode_samples import make_episode
from old_parts import files_of
from replay_samples import rollout

from osworld_pipeline.atomic_io import write_parquet
from osworld_pipeline.columns import SCHEMA_KEY
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

TOUCHED = {
    "outcome": Outcome.TOUCHED,
    "error": "a person sent 2 inputs to the desktop of this episode",
    "reward": None,
    "num_person_inputs": 2,
}


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def write(state: StateDir, *episodes: Episode) -> None:
    for episode in episodes:
        TrajectoryStore(state).write_episodes(episode.episode_id, [episode])
    rebuild_catalog(state)


def rows(state: StateDir, sql: str) -> list[tuple]:
    return list(run_query(state, sql).rows)


def test_a_touched_rollout_is_not_a_replay_row_and_keeps_its_mark(state: StateDir) -> None:
    write(state, rollout("own", 1.0), rollout("touched", **TOUCHED))
    assert rows(state, "SELECT row_id FROM replay") == [("own",)]
    marks = "SELECT episode_id, num_person_inputs, is_valid, is_success, task_reward FROM episodes ORDER BY 1"
    assert rows(state, marks) == [("own", 0, True, True, 1.0), ("touched", 2, False, False, None)]
    compact_store(state)
    (episode,) = TrajectoryStore(state).read_episodes("touched")
    assert (episode.outcome, episode.num_person_inputs) == (Outcome.TOUCHED, 2)


def test_a_touched_evaluation_has_no_success_and_no_reward(state: StateDir) -> None:
    evaluated = {"purpose": EpisodePurpose.EVALUATE, "stage_key": "eval-c-1", "checkpoint_id": "c"}
    own = make_episode("own", task_id="a", **evaluated)
    write(state, own, make_episode("touched", task_id="b", **evaluated, **TOUCHED))
    found = rows(state, "SELECT task_id, outcome, success, reward, is_valid FROM evals ORDER BY 1")
    assert [row[1:] for row in found][1] == ("touched", None, None, False)
    assert rows(state, "SELECT count(success) FROM evals") == [(1,)]


@pytest.mark.parametrize("is_compacted", [False, True])
def test_an_episode_stored_before_the_mark_existed_loads_as_untouched(state: StateDir, is_compacted: bool) -> None:
    write(state, rollout("old", 1.0))
    for path in files_of(state, "episodes"):
        table = pq.read_table(path).drop_columns(["num_person_inputs"])
        write_parquet(path, table.replace_schema_metadata({SCHEMA_KEY: b"10"}))
    if is_compacted:
        compact_store(state)
    (episode,) = TrajectoryStore(state).read_episodes("old")
    assert (episode.num_person_inputs, episode.outcome) == (0, Outcome.SUCCESS)
    rebuild_catalog(state)
    assert rows(state, "SELECT coalesce(num_person_inputs, 0) FROM episodes") == [(0,)]
    assert rows(state, "SELECT row_id FROM replay") == [("old",)]
