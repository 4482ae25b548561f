"""The sensor and the schedule that re-train the champion automatically, each called as Dagster's daemon calls them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from checkpoint_samples import lay_down, make_checkpoint
from replay_samples import rollout

from jobs.retraining import RETRAINING_TAG, ask, build_retraining_schedule, retraining_is_due
from jobs.sensors import EVALUATIONS
from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.definitions import defs
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.checkpoints.ids import CARD, gspo_data_digest, stage_checkpoint_id
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table
from resources.state import RecipeResource, StateResource

FEW = {"recipe": {"config": {"name": "smoke", "settings": ["retraining.min_new_successes=2"]}}}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def state(tmp_path: Path, instance: dg.DagsterInstance) -> StateDir:
    """A state with a champion, made an hour ago by a run that requires two new successes."""
    state = StateDir(tmp_path)
    run = instance.add_run(dg.DagsterRun(job_name="train", run_config={"resources": FEW}, status=SUCCESS))
    lay_down(state, make_checkpoint("gspo-1", run_ids={"dagster": run.run_id}))
    an_hour_ago = time.time() - 3600
    os.utime(state.checkpoints / "gspo-1" / CARD, (an_hour_ago, an_hour_ago))
    set_champion(instance, "gspo-1")
    return state


SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def set_champion(instance: dg.DagsterInstance, checkpoint_id: str) -> None:
    instance.report_runless_asset_event(
        dg.AssetMaterialization("champion", metadata={"checkpoint_id": checkpoint_id, "is new": True})
    )


def evaluated(instance: dg.DagsterInstance, checkpoint_id: str) -> None:
    key = dg.MultiPartitionKey({"checkpoint": checkpoint_id, "suite": "heldout"})
    instance.report_runless_asset_event(dg.AssetMaterialization(EVALUATIONS, partition=key))


def build_tables(instance: dg.DagsterInstance, version: str) -> None:
    tags = {"dagster/data_version": version}
    instance.report_runless_asset_event(dg.AssetMaterialization("replay_buffer", tags=tags))


def succeed(state: StateDir, *names: str, run: str = "") -> None:
    for name in names:
        episode = rollout(name, 1.0, started_at=time.time(), run_ids={"dagster": run})
        TrajectoryStore(state).write_episodes(name, [episode])


def retrained(
    instance: dg.DagsterInstance, checkpoint_id: str = "gspo-1", status: dg.DagsterRunStatus = SUCCESS
) -> str:
    tags = {RETRAINING_TAG: checkpoint_id}
    run = dg.DagsterRun(job_name="retrain", run_config={"resources": FEW}, tags=tags, status=status)
    return instance.add_run(run).run_id


def look(instance: dg.DagsterInstance, state: StateDir) -> Any:
    resources = {"state": StateResource(path=str(state.root)), "recipe": RecipeResource(name="smoke")}
    with dg.build_sensor_context(instance=instance, resources=resources) as context:
        return retraining_is_due(context)


def strike(instance: dg.DagsterInstance, state: StateDir) -> Any:
    """The request of the schedule at its scheduled time."""
    return ask(instance, StateResource(path=str(state.root)), RecipeResource(name="smoke"), is_scheduled=True)


def test_new_successes_start_a_re_training_of_the_champion_with_the_recipe_that_made_it(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    succeed(state, "a")
    assert "1 of 2 new successes" in look(instance, state).skip_message
    succeed(state, "b")
    request = look(instance, state)
    assert request.run_config["resources"] == {
        **FEW,
        "state": {"config": {"path": str(state.root)}},
        "start": {"config": {"checkpoint": "gspo-1"}},
    }
    assert request.tags[RETRAINING_TAG] == "gspo-1"
    assert look(instance, state).run_key == request.run_key, "asked twice it is begun once"
    assert dg.validate_run_config(defs.resolve_job_def("retrain"), request.run_config)


def test_a_job_that_is_started_by_hand_continues_from_the_champion() -> None:
    assert defs.resolve_job_def("retrain").run_config == {
        "resources": {"start": {"config": {"checkpoint": "champion"}}}
    }


def test_the_schedule_starts_a_re_training_without_new_successes(instance: dg.DagsterInstance, state: StateDir) -> None:
    assert isinstance(look(instance, state), dg.SkipReason)
    assert strike(instance, state).tags[RETRAINING_TAG] == "gspo-1"


def test_the_schedule_starts_a_re_training_by_itself(state: StateDir, tmp_path_factory: pytest.TempPathFactory) -> None:
    resources = {"state": StateResource(path=str(state.root)), "recipe": RecipeResource(name="smoke")}
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as lasting:
        set_champion(lasting, "gspo-1")
        with dg.build_schedule_context(instance=lasting, resources=resources) as context:
            request: Any = build_retraining_schedule("0 3 * * *")(context)
    assert request.run_config["resources"]["start"] == {"config": {"checkpoint": "gspo-1"}}


def test_tables_with_changed_data_start_a_re_training(instance: dg.DagsterInstance, state: StateDir) -> None:
    build_tables(instance, "v1")
    retrained(instance)
    time.sleep(0.01)
    build_tables(instance, "v1")
    assert isinstance(look(instance, state), dg.SkipReason), "the same data, built again"
    build_tables(instance, "v2")
    assert "have changed" in look(instance, state).tags["osworld/reason"]


@pytest.mark.parametrize(
    ("job", "assets", "kind"),
    [("retrain", None, "trainings"), ("train", None, "trainings"), ("run_flywheel", None, "trainings"),
     ("evaluate", None, "evaluations"), ("__ASSET_JOB", {"evaluations"}, "evaluations"),
     ("__ASSET_JOB", {"gspo_phase1_checkpoint", "replay_buffer"}, "trainings")],
)  # fmt: skip
@pytest.mark.parametrize("status", [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTED])
def test_no_re_training_starts_during_work_that_decides_the_champion(
    instance: dg.DagsterInstance,
    state: StateDir,
    job: str,
    assets: set[str] | None,
    kind: str,
    status: dg.DagsterRunStatus,
) -> None:
    succeed(state, "a", "b")
    selection = {dg.AssetKey(name) for name in assets} if assets else None
    instance.add_run(dg.DagsterRun(job_name=job, status=status, asset_selection=selection))
    assert f"1 {kind} have not ended" in look(instance, state).skip_message
    assert isinstance(strike(instance, state), dg.SkipReason)


def test_the_checkpoint_of_the_last_re_training_is_evaluated_and_ranked_before_the_next_one(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    run_id = retrained(instance)
    lay_down(state, make_checkpoint("gspo-2", run_ids={"dagster": run_id}))
    succeed(state, "a", "b")
    assert "gspo-2, made by the last re-training, is not evaluated yet" in look(instance, state).skip_message
    evaluated(instance, "gspo-2")
    assert "not ranked yet" in look(instance, state).skip_message
    set_champion(instance, "gspo-2")
    assert look(instance, state).tags[RETRAINING_TAG] == "gspo-2"


def test_a_failed_evaluation_does_not_block_the_next_re_training(instance: dg.DagsterInstance, state: StateDir) -> None:
    run_id = retrained(instance)
    lay_down(state, make_checkpoint("gspo-2", run_ids={"dagster": run_id}))
    succeed(state, "a", "b")
    tags = {"osworld/checkpoint": "gspo-2"}
    instance.add_run(dg.DagsterRun(job_name="evaluate", tags=tags, status=FAILURE))
    assert isinstance(look(instance, state), dg.RunRequest)


@pytest.mark.parametrize("ended", [SUCCESS, FAILURE])
def test_after_two_re_trainings_without_a_new_champion_none_starts_until_there_is_new_data(
    instance: dg.DagsterInstance, state: StateDir, ended: dg.DagsterRunStatus
) -> None:
    build_tables(instance, "v1")
    first = retrained(instance, status=ended)
    second = retrained(instance, status=ended)
    succeed(state, "a", "b", run=first)
    succeed(state, "c", run=second)
    assert "2 re-trainings of gspo-1 brought no new champion" in look(instance, state).skip_message
    assert isinstance(strike(instance, state), dg.SkipReason)
    build_tables(instance, "v2")
    assert isinstance(look(instance, state), dg.RunRequest)
    assert isinstance(strike(instance, state), dg.RunRequest)


def test_without_a_champion_or_its_weights_the_skip_message_says_what_is_missing(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    set_champion(instance, "gone")
    assert "the champion gone is not in" in look(instance, state).skip_message
    set_champion(instance, "none")
    assert "there is no champion yet" in look(instance, state).skip_message


def test_a_recipe_that_is_gone_is_named(instance: dg.DagsterInstance, state: StateDir) -> None:
    config = {"resources": {"recipe": {"config": {"name": "/gone.toml"}}}}
    run = instance.add_run(dg.DagsterRun(job_name="train", run_config=config, status=SUCCESS))
    lay_down(state, make_checkpoint("gspo-3", run_ids={"dagster": run.run_id}))
    set_champion(instance, "gspo-3")
    assert "/gone.toml" in look(instance, state).skip_message


def test_the_re_training_schedule_and_sensor_are_off_by_default() -> None:
    schedule, sensor = defs.resolve_schedule_def("retraining_schedule"), defs.resolve_sensor_def("retraining_is_due")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    assert (schedule.execution_timezone, schedule.job_name, sensor.job_name) == ("UTC", "retrain", "retrain")


def test_a_schedule_without_a_valid_time_is_refused() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="each full moon"):
        build_retraining_schedule("each full moon")


def test_where_all_stages_were_trained_before_nothing_starts_until_the_data_change(
    instance: dg.DagsterInstance, state: StateDir
) -> None:
    tasks = [{"task_id": "desktop-basics-create_folder-0001", "task_config": "{}", "instruction": "Create a folder."}]
    schemas = {name: pa.Table.from_pylist([], schema=OWNED_TABLES[name]) for name in ("replay_buffer", "train_tasks")}
    for name, table in schemas.items():
        write_table(state, name, table)
    recipe = RecipeResource(**FEW["recipe"]["config"]).load()
    parent_id = "gspo-1"
    for stage in (Stage.GSPO_PHASE1, Stage.GSPO_PHASE2):
        assert isinstance(strike(instance, state), dg.RunRequest), f"{stage} is to be trained"
        checkpoint_id = stage_checkpoint_id(
            stage, recipe, parent_id=parent_id, data_digest=gspo_data_digest(state, recipe)
        )
        lay_down(state, make_checkpoint(checkpoint_id, stage, parent_id=parent_id))
        parent_id = checkpoint_id
    assert f"to {parent_id}: no training is left" in strike(instance, state).skip_message
    write_table(state, "train_tasks", pa.Table.from_pylist(tasks, schema=OWNED_TABLES["train_tasks"]))
    assert isinstance(strike(instance, state), dg.RunRequest)
