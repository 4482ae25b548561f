"""The tracking events of a stage for MLflow, and their delivery, which is idempotent."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.tracking.client import open_client
from osworld_pipeline.tracking.models import CHECKPOINT_TAG, find_logged_model
from osworld_pipeline.tracking.outbox import TrackingEvent

ATTEMPT_TAG = "attempt"
"""Tag with the number of an attempt, from 1; on a stage's run, that of its last attempt."""
MAX_DIGEST = 36
"""MLflow's limit for the digest of a dataset."""


def metrics_event(run_ids: tuple[str, ...], update: int, metrics: Mapping[str, float], *, at_ms: int) -> TrackingEvent:
    numbers = {name: float(value) for name, value in sorted(metrics.items())}
    return {"kind": "metrics", "run_ids": list(run_ids), "update": update, "metrics": numbers, "at_ms": at_ms}


def dataset_event(run_ids: tuple[str, ...], name: str, digest: str, source: str, *, context: str) -> TrackingEvent:
    return {
        "kind": "dataset", "run_ids": list(run_ids), "name": name, "digest": digest, "source": source,
        "context": context,
    }  # fmt: skip


def checkpoint_event(run_id: str, checkpoint: Checkpoint, *, folder: Path | str) -> TrackingEvent:
    """Omits details that are in the checkpoint's own folder."""
    fields = asdict(checkpoint) | {"stage": str(checkpoint.stage), "recipe": {}, "row_ids": [], "sources": []}
    return {"kind": "checkpoint", "run_id": run_id, "checkpoint": fields, "folder": str(folder)}


def evaluation_event(run_id: str, checkpoint_id: str, metrics: Mapping[str, float]) -> TrackingEvent:
    numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return {"kind": "evaluation", "run_id": run_id, "checkpoint_id": checkpoint_id, "metrics": numbers}


def end_event(run_id: str, attempt_run_id: str, *, attempt: int, status: str, error: str) -> TrackingEvent:
    return {
        "kind": "end", "run_id": run_id, "attempt_run_id": attempt_run_id, "attempt": attempt, "status": status,
        "error": error,
    }  # fmt: skip


def deliver(tracking_uri: str, event: TrackingEvent) -> None:
    """Delivers an event. Raises MLflow's errors."""
    _DELIVERIES[event["kind"]](tracking_uri, event)


def _metrics(tracking_uri: str, event: TrackingEvent) -> None:
    from mlflow.entities import Metric

    entries = [Metric(name, value, event["at_ms"], event["update"]) for name, value in event["metrics"].items()]
    for run_id in event["run_ids"]:
        open_client(tracking_uri).log_batch(run_id, metrics=entries)


def _dataset(tracking_uri: str, event: TrackingEvent) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=event["name"], digest=event["digest"][:MAX_DIGEST], source_type="local", source=event["source"]
    )
    entry = DatasetInput(dataset, [InputTag(key="mlflow.data.context", value=event["context"])])
    for run_id in event["run_ids"]:
        open_client(tracking_uri).log_inputs(run_id, datasets=[entry])


def _checkpoint(tracking_uri: str, event: TrackingEvent) -> None:
    """Creates an external LoggedModel once; weights are not copied. Its parent is an input of the run."""
    from mlflow.entities import LoggedModelInput, LoggedModelOutput

    fields: Mapping[str, Any] = event["checkpoint"]
    if find_logged_model(tracking_uri, fields["checkpoint_id"]) is not None:
        return
    client, run_id = open_client(tracking_uri), event["run_id"]
    parent = find_logged_model(tracking_uri, fields["parent_id"]) if fields["parent_id"] else None
    if parent is not None:
        client.log_inputs(run_id, models=[LoggedModelInput(parent)])
    tags = {
        CHECKPOINT_TAG: fields["checkpoint_id"],
        "parent_checkpoint_id": fields["parent_id"] or "",
        "parent_model_id": parent or "",
        "stage": fields["stage"],
        "weights_digest": fields["weights_digest"],
        "data_digest": fields["data_digest"],
        "recipe_digest": fields["recipe_digest"],
        "code_version": fields["code_version"],
        "is_code_dirty": str(fields["is_code_dirty"]),
    }
    model = client.create_logged_model(
        experiment_id=client.get_run(run_id).info.experiment_id,
        name=fields["checkpoint_id"],
        source_run_id=run_id,
        params={"path": event["folder"], "num_updates": str(fields["num_updates"])},
        tags=tags,
        model_type="external",
    )
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, step=fields["num_updates"])])


def _evaluation(tracking_uri: str, event: TrackingEvent) -> None:
    """Metrics of the run and of the checkpoint's LoggedModel, which is an input of the run."""
    from mlflow.entities import LoggedModelInput

    client, run_id = open_client(tracking_uri), event["run_id"]
    model_id = find_logged_model(tracking_uri, event["checkpoint_id"])
    if model_id is not None:
        client.log_inputs(run_id, models=[LoggedModelInput(model_id)])
    for name, value in event["metrics"].items():
        client.log_metric(run_id, name, value, model_id=model_id)


def _end(tracking_uri: str, event: TrackingEvent) -> None:
    """Ends the run of the attempt, and that of the stage unless a later attempt has taken it over."""
    client = open_client(tracking_uri)
    if event["error"]:
        client.set_tag(event["attempt_run_id"], "error", event["error"])
    client.set_terminated(event["attempt_run_id"], event["status"])
    if client.get_run(event["run_id"]).data.tags.get(ATTEMPT_TAG) == str(event["attempt"]):
        client.set_terminated(event["run_id"], event["status"])


_DELIVERIES: Mapping[str, Callable[[str, TrackingEvent], None]] = {
    "metrics": _metrics,
    "dataset": _dataset,
    "checkpoint": _checkpoint,
    "evaluation": _evaluation,
    "end": _end,
}
