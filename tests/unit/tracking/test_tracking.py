"""What is logged to MLflow, read back from a real sqlite store."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.errors import TrackingError
from osworld_pipeline.tracking.models import champion_checkpoint, find_logged_model, register_champion
from osworld_pipeline.tracking.runs import find_attempts, find_run, flatten_params, metric_history, stage_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MLflow's own warnings are not ours to fix


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, made once because MLflow takes seconds to make one."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    find_run(f"sqlite:///{path}", "none")
    return path


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


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
        code_version="c",
    )


def fail_after_one_update(uri: str, params: dict, tags: dict) -> None:
    with stage_run(uri, stage="sft", stage_key="sft-1", params=params, tags=tags) as run:
        run.log_metrics(1, {"loss": 2.0})
        raise RuntimeError("the trainer was killed")


def test_a_stage_has_one_run_with_a_child_run_per_attempt_and_its_checkpoint_names_its_parent(
    uri: str, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    params = {"sft": {"learning_rate": 0.003}, "data_digest": "d"}
    with stage_run(uri, stage="base", stage_key="base-1", params={}, tags={}) as run:
        run.log_checkpoint(checkpoint("base-1", Stage.BASE, None), folder=tmp_path)
    base_model = find_logged_model(uri, "base-1")
    with pytest.raises(RuntimeError):
        fail_after_one_update(uri, params, {"dagster.run_id": "run-1"})

    client = MlflowClient(tracking_uri=uri)
    first = find_run(uri, "sft-1")
    assert first is not None
    assert client.get_run(first).info.status == "FAILED"
    with stage_run(uri, stage="sft", stage_key="sft-1", params=params, tags={"dagster.run_id": "run-2"}) as run:
        assert run.run_id == first, "a resumed stage goes on in its run"
        run.log_dataset("replay_and_tasks", "d" * 64, "tables")
        run.log_metrics(2, {"loss": 1.0})
        run.log_checkpoint(checkpoint("sft-1", Stage.SFT, "base-1"), folder=tmp_path)
        run.log_checkpoint(checkpoint("sft-1", Stage.SFT, "base-1"), folder=tmp_path)
        assert run.url("http://m/") == f"http://m/#/experiments/{run.experiment_id}/runs/{first}"

    ended = client.get_run(first)
    assert ended.info.status == "FINISHED"
    assert ended.data.params == {"sft.learning_rate": "0.003", "data_digest": "d"}
    assert ended.data.tags["dagster.run_id"] == "run-2"
    assert [entry.model_id for entry in ended.inputs.model_inputs] == [base_model]
    assert [entry.dataset.digest for entry in ended.inputs.dataset_inputs] == ["d" * 36]
    assert metric_history(uri, "sft-1", ["loss"]) == [("loss", 1, 2.0), ("loss", 2, 1.0)]

    attempts = [client.get_run(attempt) for attempt in find_attempts(uri, "sft-1")]
    assert [attempt.data.tags["mlflow.parentRunId"] for attempt in attempts] == [first, first]
    assert [attempt.info.status for attempt in attempts] == ["FAILED", "FINISHED"]
    assert [attempt.data.metrics for attempt in attempts] == [{"loss": 2.0}, {"loss": 1.0}]
    assert [attempt.data.tags["dagster.run_id"] for attempt in attempts] == ["run-1", "run-2"]
    assert attempts[0].data.tags["error"] == "the trainer was killed"
    assert attempts[1].data.params == ended.data.params

    model = find_logged_model(uri, "sft-1")
    assert model is not None
    reported = client.get_logged_model(model)
    assert (reported.tags["parent_checkpoint_id"], reported.tags["parent_model_id"]) == ("base-1", base_model)
    assert (reported.source_run_id, reported.params["path"]) == (first, str(tmp_path))


def test_the_next_attempt_marks_a_killed_attempt_as_killed(uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    with stage_run(uri, stage="sft", stage_key="sft-1", params={}, tags={}) as run:
        pass
    client.update_run(run.attempt_run_id, status="RUNNING")  # the status that SIGKILL leaves
    with stage_run(uri, stage="sft", stage_key="sft-1", params={}, tags={}):
        pass
    statuses = [client.get_run(run_id).info.status for run_id in find_attempts(uri, "sft-1")]
    assert statuses == ["KILLED", "FINISHED"]


def test_the_champion_moves_to_the_registered_checkpoint(uri: str, tmp_path: Path) -> None:
    assert champion_checkpoint(uri) is None
    with pytest.raises(TrackingError, match="has no model of sft-1"):
        register_champion(uri, "sft-1")
    with stage_run(uri, stage="sft", stage_key="sft-1", params={}, tags={}) as run:
        for name in ("sft-1", "sft-2"):
            run.log_checkpoint(checkpoint(name, Stage.SFT, None), folder=tmp_path)
    assert [register_champion(uri, name) for name in ("sft-1", "sft-2")] == ["1", "2"]
    assert champion_checkpoint(uri) == "sft-2"
    assert register_champion(uri, "sft-1") == "1", "a checkpoint has one version for ever"
    assert champion_checkpoint(uri) == "sft-1"
    assert "MLFLOW_TRACKING_URI" not in os.environ, "MLflow's default store is as it was"


def test_more_parameters_than_mlflow_accepts_at_once_are_all_logged(uri: str) -> None:
    from mlflow import MlflowClient

    params = {f"p{number}": number for number in range(120)}
    with stage_run(uri, stage="sft", stage_key="sft-1", params=params, tags={}) as run:
        pass
    assert len(MlflowClient(tracking_uri=uri).get_run(run.run_id).data.params) == 120


def test_nested_parameters_are_flattened_by_dots() -> None:
    assert flatten_params({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_a_program_killed_while_it_makes_the_database_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    database = tmp_path / "mlflow" / "mlflow.db"
    opening = f"from osworld_pipeline.tracking.runs import find_run; find_run('sqlite:///{database}', 'a-stage')"
    process = subprocess.Popen([sys.executable, "-c", opening])
    try:
        wait_until = time.monotonic() + 60
        # The hidden temporary file has its first tables: the program is running the migrations.
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
    assert list(database.parent.glob("*.tmp*")) == [], "what the killed one left is gone"


TELEMETRY = """
import sys
from osworld_pipeline.tracking.client import open_client
open_client(sys.argv[1])
from mlflow.telemetry.client import get_telemetry_client
print(get_telemetry_client())
"""


def test_mlflow_sends_no_usage_telemetry(uri: str) -> None:
    # The environment is empty: in this one MLflow detects a test and reports nothing in any case.
    run = subprocess.run(
        [sys.executable, "-c", TELEMETRY, uri], env={}, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "None"


def test_a_metric_under_its_earlier_name_belongs_to_the_same_curve(uri: str) -> None:
    with stage_run(uri, stage="gspo_phase1", stage_key="gspo-1", params={}, tags={}) as run:
        run.log_metrics(1, {"clip_fraction": 0.25})
        run.log_metrics(2, {"clip_fraction": 0.5})
        run.log_metrics(2, {"clipped_share": 0.125})
    assert metric_history(uri, "gspo-1", ["clipped_share"]) == [("clipped_share", 1, 0.25), ("clipped_share", 2, 0.125)]
    assert metric_history(uri, "gspo-1", ["loss"]) == []


def test_mlflow_is_imported_in_the_background_and_is_then_ready(uri: str) -> None:
    script = (
        "import os, sys, threading\n"
        "from osworld_pipeline.tracking.client import DEFAULTS, import_in_background, open_client\n"
        "import_in_background()\n"
        "assert set(DEFAULTS) <= set(os.environ)\n"
        "(thread,) = [one for one in threading.enumerate() if one.name == 'import of MLflow']\n"
        "thread.join(60)\n"
        "assert 'mlflow' in sys.modules\n"
        f"assert open_client({uri!r}).search_experiments()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_failed_background_import_is_raised_when_mlflow_is_used(tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("raise ImportError('broken')")
    script = (
        "import threading\n"
        "from osworld_pipeline.tracking.client import import_in_background, open_client\n"
        "import_in_background()\n"
        "[one.join(60) for one in threading.enumerate() if one is not threading.main_thread()]\n"
        "open_client('sqlite:////tmp/none.db')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.count("ImportError: broken") == 1
