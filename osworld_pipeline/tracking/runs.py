"""The MLflow runs of a stage: one run of the stage, which all its attempts continue, and below it one run for each
attempt, with the same parameters and its own metrics, times and status.

The stage's run is found again by its `stage_key`; its curves are those of the checkpoint. An attempt's run shows the
work of one launch, also if a later one repeated it. The runs are opened synchronously, and errors are raised; all later
events go through an outbox, so that training survives a tracking server that dies.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.columns.metric_names import EARLIER_NAMES, present_name
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.tracking.client import first_words, open_client, run_url, search_everywhere, tracking_errors
from osworld_pipeline.tracking.events import (
    ATTEMPT_TAG,
    checkpoint_event,
    dataset_event,
    deliver,
    end_event,
    evaluation_event,
    metrics_event,
)
from osworld_pipeline.tracking.models import find_logged_model
from osworld_pipeline.tracking.outbox import Outbox

__all__ = [
    "StageRun",
    "find_attempts",
    "find_logged_model",
    "find_run",
    "flatten_params",
    "metric_history",
    "stage_run",
]

STAGE_KEY_TAG = "stage_key"
ATTEMPT_OF_TAG = "attempt_of"
PARENT_TAG = "mlflow.parentRunId"
MAX_BATCH = 100
"""Maximum number of parameters per request to MLflow."""
INTERRUPTED_CLOSE_S = 5.0
"""Shorter wait after a request to stop, because a slow process is killed."""


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A running attempt at a stage. Calls only queue an event, and do not raise."""

    run_id: str
    """Run of the stage, the same for all attempts."""
    attempt_run_id: str
    attempt: int
    """Number of the attempt, from 1."""
    experiment_id: str
    tracking_uri: str
    outbox: Outbox

    def log_metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        self.outbox.post(metrics_event(self._both, update, metrics, at_ms=int(time.time() * 1000)))

    def log_dataset(self, name: str, digest: str, source: str, *, context: str = "training") -> None:
        """Records the training data by our own digest."""
        self.outbox.post(dataset_event(self._both, name, digest, source, context=context))

    def log_checkpoint(self, checkpoint: Checkpoint, *, folder: Path | str) -> None:
        """Registers `checkpoint` as an external LoggedModel once, its parent as an input of the run. `folder`: of the
        weights, or an endpoint's address."""
        self.outbox.post(checkpoint_event(self.run_id, checkpoint, folder=folder))

    def log_evaluation(self, checkpoint_id: str, metrics: Mapping[str, float]) -> None:
        """Figures of a checkpoint: metrics of this run and of its LoggedModel, which is an input of the run."""
        self.outbox.post(evaluation_event(self.run_id, checkpoint_id, metrics))

    def url(self, base_url: str) -> str:
        """The page of the stage in MLflow's UI at `base_url`."""
        return run_url(base_url, self.experiment_id, self.run_id)

    @property
    def _both(self) -> tuple[str, str]:
        return self.run_id, self.attempt_run_id


@contextmanager
def stage_run(
    tracking_uri: str,
    *,
    stage: str,
    stage_key: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    unsent: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[StageRun]:
    """Opens a new attempt at the stage `stage_key`; both runs end FINISHED, FAILED, or KILLED when interrupted.

    Nested `params` are flattened: `gspo.phase1.temperature`. `unsent`: folder for unsent events, also those of earlier
    stages; None: not kept. `say`: called with one sentence when MLflow stops responding or responds again, and when
    events are refused, dropped or unsent at the end; None logs a warning.

    Raises:
        TrackingError: MLflow cannot be reached, or refuses, when the runs are opened.
        StoreError: MLflow's SQLite database cannot be used or created.
    """
    with tracking_errors(tracking_uri, f"cannot open the run of {stage_key}"):
        opened = _open(tracking_uri, stage, stage_key, flatten_params(params), tags)
    run_id, attempt_run_id, attempt, experiment_id = opened
    outbox = Outbox(
        partial(deliver, tracking_uri),
        name=attempt_run_id,
        say=say or logging.getLogger(__name__).warning,
        # Run ids are not valid in another store.
        folder=unsent / digest_bytes(tracking_uri.encode())[:12] if unsent else None,
    )
    status, error_text = "KILLED", ""
    try:
        yield StageRun(
            run_id=run_id, attempt_run_id=attempt_run_id, attempt=attempt, experiment_id=experiment_id,
            tracking_uri=tracking_uri, outbox=outbox,
        )  # fmt: skip
        status = "FINISHED"
    except Exception as error:
        status, error_text = "FAILED", first_words(error, limit=500)
        raise
    finally:
        outbox.post(end_event(run_id, attempt_run_id, attempt=attempt, status=status, error=error_text))
        if status == "KILLED":
            outbox.close(timeout_s=INTERRUPTED_CLOSE_S)
        else:
            outbox.close()


def find_run(tracking_uri: str, stage_key: str) -> str | None:
    """The run of a stage, with any status. Raises TrackingError."""
    with tracking_errors(tracking_uri, f"cannot look up the run of {stage_key}"):
        found = _search(open_client(tracking_uri), STAGE_KEY_TAG, stage_key, limit=1)
        return found[0].info.run_id if found else None


def find_attempts(tracking_uri: str, stage_key: str) -> list[str]:
    """The runs of a stage's attempts, in order. Raises TrackingError."""
    with tracking_errors(tracking_uri, f"cannot look up the attempts of {stage_key}"):
        found = _search(open_client(tracking_uri), ATTEMPT_OF_TAG, stage_key)
        return [run.info.run_id for run in sorted(found, key=lambda run: int(run.data.tags[ATTEMPT_TAG]))]


def metric_history(tracking_uri: str, stage_key: str, names: Sequence[str]) -> list[tuple[str, int, float]]:
    """(metric, update, value) of a stage's run; a value logged again for the same update replaces the one before."""
    run_id = find_run(tracking_uri, stage_key)
    if run_id is None:
        return []
    client = open_client(tracking_uri)
    known = client.get_run(run_id).data.metrics
    latest: dict[tuple[str, int], float] = {}
    stored = [*EARLIER_NAMES.values(), *names]  # present names last: their values replace those under earlier names
    for name in (name for name in stored if name in known and present_name(name) in names):
        history = client.get_metric_history(run_id, name)
        latest |= {(present_name(name), metric.step): metric.value for metric in history}
    return [(name, update, value) for (name, update), value in sorted(latest.items())]


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


def _open(
    tracking_uri: str, stage: str, stage_key: str, params: Mapping[str, Any], tags: Mapping[str, str]
) -> tuple[str, str, int, str]:
    """(stage's run, attempt's run, its number, their experiment)."""
    client = open_client(tracking_uri)
    found = _search(client, STAGE_KEY_TAG, stage_key, limit=1)
    earlier = _search(client, ATTEMPT_OF_TAG, stage_key)
    attempt = 1 + max((int(run.data.tags[ATTEMPT_TAG]) for run in earlier), default=0)
    numbered = {**tags, ATTEMPT_TAG: str(attempt)}
    if found:
        run_id, experiment_id = found[0].info.run_id, found[0].info.experiment_id
        client.update_run(run_id, status="RUNNING")
        for name, value in numbered.items():
            client.set_tag(run_id, name, value)
    else:
        experiment_id = _experiment(client, f"osworld/{stage}")
        run_id = _create(client, experiment_id, stage_key, {STAGE_KEY_TAG: stage_key, **numbered}, params)
    for run in earlier:
        if run.info.status == "RUNNING":  # left by a kill
            client.set_terminated(run.info.run_id, "KILLED")
    below = {PARENT_TAG: run_id, ATTEMPT_OF_TAG: stage_key, **numbered}
    return run_id, _create(client, experiment_id, f"attempt {attempt}", below, params), attempt, experiment_id


def _create(client: Any, experiment_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> str:
    from mlflow.entities import Param

    run_id = client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id
    entries = [Param(key, str(value)) for key, value in params.items()]
    for start in range(0, len(entries), MAX_BATCH):
        client.log_batch(run_id, params=entries[start : start + MAX_BATCH])
    return run_id


def _search(client: Any, tag: str, value: str, *, limit: int = 1000) -> list[Any]:
    return client.search_runs(search_everywhere(client), f"tags.{tag} = '{value}'", max_results=limit)


def _experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:  # another stage was faster
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id
