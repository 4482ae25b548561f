"""What MLflow is told, read back from a real sqlite store."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.lineage.tracking import find_logged_model, find_run, flatten_params, metric_history, stage_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MLflow's own warnings are not ours to mend


def checkpoint(name: str, stage: Stage, parent_id: str | None) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=name,
        stage=stage,
        parent_id=parent_id,
        path=f"checkpoints/{name}",
        num_updates=3,
        recipe_digest="r",
        data_digest="d",
        weights_digest="w",
    )


def fail_after_one_update(uri: str, params: dict, tags: dict) -> None:
    with stage_run(uri, stage="sft", stage_key="sft-1", params=params, tags=tags) as run:
        run.log_metrics(1, {"loss": 2.0})
        raise RuntimeError("the trainer was killed")


def test_stage_has_one_run_with_its_parameters_and_its_checkpoint_points_to_its_parent(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    tags = {"dagster.run_id": "run-1"}
    params = {"sft": {"learning_rate": 0.003}, "data_digest": "d"}
    with stage_run(uri, stage="base", stage_key="base-1", params={}, tags=tags) as run:
        base_model = run.log_checkpoint(checkpoint("base-1", Stage.BASE, None), folder=tmp_path)
    with pytest.raises(RuntimeError):
        fail_after_one_update(uri, params, tags)

    client = MlflowClient(tracking_uri=uri)
    first = find_run(uri, "sft-1")
    assert first is not None
    assert client.get_run(first).info.status == "FAILED"
    with stage_run(uri, stage="sft", stage_key="sft-1", params=params, tags={"dagster.run_id": "run-2"}) as run:
        assert run.run_id == first, "a resumed stage goes on in its run"
        run.log_metrics(2, {"loss": 1.0})
        model = run.log_checkpoint(checkpoint("sft-1", Stage.SFT, "base-1"), folder=tmp_path)
        assert run.log_checkpoint(checkpoint("sft-1", Stage.SFT, "base-1"), folder=tmp_path) == model

    ended = client.get_run(first)
    assert ended.info.status == "FINISHED"
    assert ended.data.params == {"sft.learning_rate": "0.003", "data_digest": "d"}
    assert ended.data.tags["dagster.run_id"] == "run-2"
    assert [entry.model_id for entry in ended.inputs.model_inputs] == [base_model]
    assert client.get_logged_model(model).tags["parent_checkpoint_id"] == "base-1"
    assert find_logged_model(uri, "sft-1") == model
    assert metric_history(uri, "sft-1", ["loss"]) == [("loss", 1, 2.0), ("loss", 2, 1.0)]


def test_nested_parameters_are_flattened_by_dots() -> None:
    assert flatten_params({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_a_program_killed_while_it_makes_the_database_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    database = tmp_path / "mlflow" / "mlflow.db"
    opening = f"from osworld_pipeline.lineage.tracking import find_run; find_run('sqlite:///{database}', 'a-stage')"
    process = subprocess.Popen([sys.executable, "-c", opening])
    try:
        wait_until = time.monotonic() + 60
        # Its hidden temporary file has its first tables: it is among the migrations.
        while not any(path.stat().st_size for path in database.parent.glob(".*.tmp")):
            assert time.monotonic() < wait_until
            assert process.poll() is None, "it was over before it could be killed"
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert not database.exists()
    assert find_run(f"sqlite:///{database}", "a-stage") is None
    assert database.exists()
