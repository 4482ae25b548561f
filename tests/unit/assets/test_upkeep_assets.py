"""Compaction as an asset and garbage collection as a job, over a small store."""

import dagster as dg
from episode_samples import make_episode
from raw_samples import image_bytes

from assets.upkeep import compacted_trajectories
from jobs.compaction import compaction_schedule
from jobs.upkeep import collect_garbage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import MANIFEST
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from resources.state import StateResource


def test_compaction_reports_what_it_did_and_loses_no_row(tmp_path) -> None:
    state = StateDir(tmp_path)
    store = TrajectoryStore(state)
    for number in range(9):
        store.write_episodes(f"p{number}", [make_episode(f"e{number}")])
    result = dg.materialize([compacted_trajectories], resources={"state": StateResource(path=str(tmp_path))})
    (event,) = result.get_asset_materialization_events()
    assert event.step_materialization_data.materialization.metadata["num_parts"].value == 9
    rebuild_catalog(state)
    assert run_query(state, "SELECT count(*), count(DISTINCT episode_id) FROM episodes").rows == [(9, 9)]
    assert run_query(state, "SELECT count(*) FROM steps").rows == [(18,)]


def test_the_schedule_compacts_only_if_there_are_small_parts(tmp_path) -> None:
    store, resource = TrajectoryStore(StateDir(tmp_path)), StateResource(path=str(tmp_path))

    def ask() -> dg.RunRequest | dg.SkipReason:
        with dg.build_schedule_context(resources={"state": resource}) as context:
            answer = compaction_schedule(context)
        assert isinstance(answer, dg.RunRequest | dg.SkipReason)
        return answer

    assert compaction_schedule.default_status == dg.DefaultScheduleStatus.RUNNING
    assert isinstance(ask(), dg.SkipReason)
    for number in range(8):
        store.write_episodes(f"p{number}", [make_episode(f"e{number}")])
    assert isinstance(ask(), dg.RunRequest)
    dg.materialize([compacted_trajectories], resources={"state": resource})
    assert isinstance(ask(), dg.SkipReason)
    (tmp_path / "trajectories" / MANIFEST).write_bytes(b"{")
    assert isinstance(ask(), dg.SkipReason)


def test_garbage_collection_keeps_a_blob_that_was_just_written(tmp_path) -> None:
    state = StateDir(tmp_path)
    sha256 = TrajectoryStore(state).write_blob(image_bytes(1), suffix="png")
    result = collect_garbage.execute_in_process(resources={"state": StateResource(path=str(tmp_path))})
    assert result.success
    assert TrajectoryStore(state).read_blob(sha256) == image_bytes(1)
