"""The sensors evaluate new checkpoints once each, and start a ranking when the last of these evaluations has ended."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from checkpoint_samples import lay_down, make_checkpoint

from jobs.sensors import EVALUATIONS, new_checkpoints, new_evaluations
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.checkpoints.external import add_checkpoint
from resources.state import RecipeResource, StateResource


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def look(instance: dg.DagsterInstance, state: StateDir, *settings: str) -> Any:
    resources = {
        "state": StateResource(path=str(state.root)),
        "recipe": RecipeResource(name="smoke", settings=list(settings)),
    }
    with dg.build_sensor_context(instance=instance, resources=resources) as context:
        return new_checkpoints(context)


def partitions(result: Any) -> list[tuple[str, str]]:
    keys = [request.partition_key.keys_by_dimension for request in result.run_requests]
    return [(key["checkpoint"], key["suite"]) for key in keys]


def evaluated(instance: dg.DagsterInstance, checkpoint: str, suite: str = "heldout") -> None:
    key = dg.MultiPartitionKey({"checkpoint": checkpoint, "suite": suite})
    instance.report_runless_asset_event(dg.AssetMaterialization(EVALUATIONS, partition=key))


def test_every_checkpoint_is_evaluated_on_the_suites_of_the_recipe(state: StateDir) -> None:
    lay_down(state, make_checkpoint("sft-1"), make_checkpoint("sft-1-u0002", num_updates=2))
    with dg.DagsterInstance.ephemeral() as instance:
        result = look(instance, state, 'evaluation.suites=["heldout", "osworld-os"]')
        assert partitions(result) == [
            ("sft-1-u0002", "heldout"), ("sft-1-u0002", "osworld-os"), ("sft-1", "heldout"), ("sft-1", "osworld-os"),
        ]  # fmt: skip
        assert result.dynamic_partitions_requests[0].partition_keys == ["sft-1-u0002", "sft-1"]
        assert len({request.run_key for request in result.run_requests}) == 4


def test_an_evaluated_checkpoint_is_not_evaluated_again(state: StateDir) -> None:
    lay_down(state, make_checkpoint("sft-1"), make_checkpoint("sft-2"))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("checkpoints", ["sft-1"])
        evaluated(instance, "sft-1")
        result = look(instance, state)
        assert partitions(result) == [("sft-2", "heldout")]
        instance.add_dynamic_partitions("checkpoints", ["sft-2"])
        evaluated(instance, "sft-2")
        assert isinstance(look(instance, state), dg.SkipReason)


def test_an_evaluation_uses_the_recipe_that_trained_the_checkpoint(state: StateDir) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        trained_with = {"recipe": {"config": {"name": "smoke", "settings": ["evaluation.max_turns=1"]}}}
        run = instance.add_run(dg.DagsterRun(job_name="train", run_config={"resources": trained_with | {"other": {}}}))
        lay_down(state, make_checkpoint("sft-1", run_ids={"dagster": run.run_id}), make_checkpoint("sft-2"))
        first, second = look(instance, state).run_requests
        assert first.run_config["resources"] == trained_with | {"state": {"config": {"path": str(state.root)}}}
        assert "recipe" not in second.run_config["resources"]


def test_a_checkpoint_whose_recipe_is_gone_does_not_block_the_others(state: StateDir) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        config = {"resources": {"recipe": {"config": {"name": "/gone.toml"}}}}
        run = instance.add_run(dg.DagsterRun(job_name="train", run_config=config))
        lay_down(state, make_checkpoint("sft-1", run_ids={"dagster": run.run_id}), make_checkpoint("sft-2"))
        assert partitions(look(instance, state)) == [("sft-2", "heldout")]


def test_checkpoint_from_elsewhere_is_evaluated_on_the_suites_of_the_default_recipe(state: StateDir) -> None:
    added = add_checkpoint(state, "https://models.example/v1#m")
    with dg.DagsterInstance.ephemeral() as instance:
        (request,) = look(instance, state).run_requests
    assert request.partition_key.keys_by_dimension == {"checkpoint": added.checkpoint_id, "suite": "heldout"}
    assert list(request.run_config["resources"]) == ["state"]


def test_ranking_waits_for_the_last_evaluation_and_happens_once() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = None

        def rank() -> Any:
            nonlocal cursor
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            asked = new_evaluations(context)
            cursor = context.cursor
            return asked

        assert isinstance(rank(), dg.SkipReason)
        evaluated(instance, "sft-1")
        running = instance.add_run(dg.DagsterRun(job_name="evaluate", status=dg.DagsterRunStatus.STARTED))
        assert "1 evaluations have not ended" in str(rank().skip_message)
        by_hand = dg.DagsterRun(
            job_name="__ASSET_JOB", status=dg.DagsterRunStatus.NOT_STARTED, asset_selection={dg.AssetKey("evaluations")}
        )
        instance.add_run(by_hand)
        assert "2 evaluations have not ended" in str(rank().skip_message)
        instance.delete_run(by_hand.run_id)
        instance.report_run_canceled(running)
        assert isinstance(rank(), dg.RunRequest)
        assert isinstance(rank(), dg.SkipReason)
