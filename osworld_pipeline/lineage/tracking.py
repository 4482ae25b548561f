"""What MLflow is told: a run for each stage, a LoggedModel for each checkpoint, parents as inputs.

A stage has one run for ever, found again by its `stage_key`: a killed stage goes on in the run it began, and a stage
that was already done is not logged twice. mlflow takes seconds to import, so it is imported inside functions only.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.durable import locked, replacing
from osworld_pipeline.errors import StoreError

STAGE_KEY_TAG = "stage_key"
CHECKPOINT_TAG = "checkpoint_id"
SQLITE = "sqlite:///"
TABLES_TIMEOUT_S = 120.0
"""Making them takes a few seconds."""


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A running MLflow run, written to through one client."""

    run_id: str
    tracking_uri: str

    def log_metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(name, float(value), now_ms, update) for name, value in sorted(metrics.items())]
        _client(self.tracking_uri).log_batch(self.run_id, metrics=entries)

    def log_dataset(self, name: str, digest: str, source: str) -> None:
        """Records which data went in, by our own digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name=name, digest=digest[:36], source_type="local", source=source)
        tag = InputTag(key="mlflow.data.context", value="training")
        _client(self.tracking_uri).log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])

    def log_checkpoint(self, checkpoint: Checkpoint, *, folder: Path) -> str:
        """Registers `checkpoint` as an external LoggedModel once, its parent as an input of the run.

        Returns the LoggedModel's id.
        """
        existing = find_logged_model(self.tracking_uri, checkpoint.checkpoint_id)
        if existing is not None:
            return existing
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        client = _client(self.tracking_uri)
        if checkpoint.parent_id is not None:
            parent = find_logged_model(self.tracking_uri, checkpoint.parent_id)
            if parent is not None:
                client.log_inputs(self.run_id, models=[LoggedModelInput(parent)])
        tags = {
            CHECKPOINT_TAG: checkpoint.checkpoint_id,
            "parent_checkpoint_id": checkpoint.parent_id or "",
            "stage": str(checkpoint.stage),
            "weights_digest": checkpoint.weights_digest,
            "data_digest": checkpoint.data_digest,
        }
        model = client.create_logged_model(
            experiment_id=client.get_run(self.run_id).info.experiment_id,
            name=checkpoint.checkpoint_id,
            source_run_id=self.run_id,
            params={"path": str(folder), "num_updates": str(checkpoint.num_updates)},
            tags=tags,
            model_type="external",
        )
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(self.run_id, models=[LoggedModelOutput(model.model_id, step=checkpoint.num_updates)])
        return model.model_id

    def log_evaluation(self, checkpoint_id: str, metrics: Mapping[str, float]) -> None:
        """Figures of a checkpoint: metrics of this run and of its LoggedModel, which is an input of the run."""
        from mlflow.entities import LoggedModelInput

        client = _client(self.tracking_uri)
        model_id = find_logged_model(self.tracking_uri, checkpoint_id)
        if model_id is not None:
            client.log_inputs(self.run_id, models=[LoggedModelInput(model_id)])
        for name, value in metrics.items():
            if math.isfinite(value):
                client.log_metric(self.run_id, name, float(value), model_id=model_id)


@contextmanager
def stage_run(
    tracking_uri: str, *, stage: str, stage_key: str, params: Mapping[str, Any], tags: Mapping[str, str]
) -> Iterator[StageRun]:
    """Opens or continues the run of `stage_key`; ends it FINISHED, FAILED, or KILLED when interrupted.

    Nested `params` are flattened: `gspo.phase1.temperature`.
    """
    from mlflow.entities import Param

    client = _client(tracking_uri)
    run_id = find_run(tracking_uri, stage_key)
    if run_id is None:
        experiment_id = _experiment(tracking_uri, f"osworld/{stage}")
        run = client.create_run(experiment_id, run_name=stage_key, tags={STAGE_KEY_TAG: stage_key, **tags})
        run_id = run.info.run_id
        client.log_batch(run_id, params=[Param(name, str(value)) for name, value in flatten_params(params).items()])
    else:
        client.update_run(run_id, status="RUNNING")
        for name, value in tags.items():
            client.set_tag(run_id, name, value)
    status = "KILLED"
    try:
        yield StageRun(run_id=run_id, tracking_uri=tracking_uri)
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        client.set_terminated(run_id, status)


def find_run(tracking_uri: str, stage_key: str) -> str | None:
    """The run of a stage, whatever its status."""
    client = _client(tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.{STAGE_KEY_TAG} = '{stage_key}'", max_results=1)
    return runs[0].info.run_id if runs else None


def metric_history(tracking_uri: str, stage_key: str, names: Sequence[str]) -> list[tuple[str, int, float]]:
    """(metric, update, value) of a stage's run; a value logged again for the same update replaces the one before."""
    run_id = find_run(tracking_uri, stage_key)
    if run_id is None:
        return []
    client = _client(tracking_uri)
    known = client.get_run(run_id).data.metrics
    latest: dict[tuple[str, int], float] = {}
    for name in names:
        if name in known:
            latest |= {(name, metric.step): metric.value for metric in client.get_metric_history(run_id, name)}
    return [(name, update, value) for (name, update), value in sorted(latest.items())]


def find_logged_model(tracking_uri: str, checkpoint_id: str) -> str | None:
    """The LoggedModel of a checkpoint."""
    client = _client(tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    if not experiments:
        return None
    found = client.search_logged_models(
        experiments, filter_string=f"tags.{CHECKPOINT_TAG} = '{checkpoint_id}'", max_results=1
    )
    return found[0].model_id if found else None


def flatten_params(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested recipe section as MLflow parameters: `gspo.phase1.temperature` = 0.8."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(flatten_params(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def _experiment(tracking_uri: str, name: str) -> str:
    client = _client(tracking_uri)
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment else client.create_experiment(name)


def _client(tracking_uri: str) -> Any:
    """A client, without MLflow's chatter; a new sqlite database has all its tables before anyone sees it."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # written, not read: MLflow sets its level from it
    from mlflow import MlflowClient

    database = Path(tracking_uri.removeprefix(SQLITE))
    if tracking_uri.startswith(SQLITE) and not database.exists():
        lock = database.with_name(f".{database.name}.lock")
        with locked(lock, timeout_s=TABLES_TIMEOUT_S, error=StoreError, what=f"making {database}"):
            if not database.exists():
                # Killed among MLflow's dozens of migrations, it would leave a database that nobody opens again.
                with replacing(database) as temp:
                    MlflowClient(tracking_uri=f"{SQLITE}{temp}").search_experiments(max_results=1)
    return MlflowClient(tracking_uri=tracking_uri)
