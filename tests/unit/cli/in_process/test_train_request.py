"""Which stages `osworld-pipeline train` trains, and what the first of them starts from."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from checkpoint_samples import lay_down, make_checkpoint

from osworld_pipeline.cli.in_process.train import STAGES, TrainRequest, assets_to_train, find_start
from osworld_pipeline.definitions import defs
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError, StoreError, TableError


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def test_all_stages_are_trained_where_none_is_named() -> None:
    assert TrainRequest.parse("", "").chosen == STAGES
    assert TrainRequest.parse("", "").is_whole


def test_a_named_checkpoint_is_trained_by_the_flywheel_and_the_phases() -> None:
    assert TrainRequest.parse("", "best-1").chosen == (Stage.FLYWHEEL, Stage.GSPO_PHASE1, Stage.GSPO_PHASE2)


def test_named_stages_are_put_in_order() -> None:
    assert TrainRequest.parse("gspo_phase1, flywheel,sft", "").chosen == (
        Stage.SFT,
        Stage.FLYWHEEL,
        Stage.GSPO_PHASE1,
    )


@pytest.mark.parametrize(
    ("stages", "start", "words"),
    [
        ("gsop_phase1", "", "did you mean 'gspo_phase1'?"),
        ("sft,gspo_phase1", "", "are not consecutive"),
        ("base,sft", "best-1", "remove base from --stages"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(stages: str, start: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace("?", r"\?")):
        TrainRequest.parse(stages, start)


def test_the_assets_of_a_request_are_the_data_and_the_checkpoints_of_its_stages() -> None:
    names = {key.to_user_string() for key in assets_to_train(defs, (Stage.GSPO_PHASE1,))}
    assert {"gspo_phase1_checkpoint", "replay_buffer", "train_tasks", "verified_replay"} <= names
    assert not {"base_checkpoint", "sft_checkpoint", "flywheel_checkpoint", "gspo_phase2_checkpoint"} & names


def test_the_first_stage_starts_from_the_named_checkpoint(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    lay_down(state, make_checkpoint("best-1", Stage.GSPO_PHASE2))
    found = find_start(instance, state, TrainRequest.parse("gspo_phase1", "best-1"))
    assert found is not None
    assert found.checkpoint_id == "best-1"


def test_the_default_start_is_the_checkpoint_of_the_upstream_asset(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    state = StateDir(tmp_path)
    request = TrainRequest.parse("flywheel", "")
    with pytest.raises(TableError, match="trains the checkpoint of sft_checkpoint, which does not exist yet"):
        find_start(instance, state, request)
    lay_down(state, make_checkpoint("sft-1"))
    instance.report_runless_asset_event(dg.AssetMaterialization("sft_checkpoint", metadata={"checkpoint_id": "sft-1"}))
    found = find_start(instance, state, request)
    assert found is not None
    assert found.checkpoint_id == "sft-1"


def test_an_endpoint_cannot_be_trained(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no weights to train"):
        find_start(instance, StateDir(tmp_path), TrainRequest.parse("", "http://127.0.0.1:1/v1#model"))
