"""Checkpoints in MLflow: LoggedModels by reference, and the champion of the model registry."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from osworld_pipeline.errors import TrackingError
from osworld_pipeline.tracking.client import SQLITE, open_client, search_everywhere, tracking_errors

CHECKPOINT_TAG = "checkpoint_id"
POLICY = "osworld-policy"
CHAMPION = "champion"
_DEFAULT_STORE = threading.Lock()
"""MLflow's default store is shared by all threads of the process, so one thread at a time may change it."""


def find_logged_model(tracking_uri: str, checkpoint_id: str) -> str | None:
    """The LoggedModel of a checkpoint."""
    client = open_client(tracking_uri)
    experiments = search_everywhere(client)
    if not experiments:
        return None
    found = client.search_logged_models(
        experiments, filter_string=f"tags.{CHECKPOINT_TAG} = '{checkpoint_id}'", max_results=1
    )
    return found[0].model_id if found else None


def register_champion(tracking_uri: str, checkpoint_id: str) -> str:
    """Moves the alias `champion` of the registered model `osworld-policy` to the version of this checkpoint, which is
    created by reference if there is none; returns the version.

    Raises:
        TrackingError: the checkpoint is unknown to MLflow, or MLflow cannot be reached.
    """
    with tracking_errors(tracking_uri, f"cannot make {checkpoint_id} the champion"):
        client = open_client(tracking_uri)
        version = _find_version(client, checkpoint_id) or _create_version(client, tracking_uri, checkpoint_id)
        client.set_registered_model_alias(POLICY, CHAMPION, version)
        return version


def champion_checkpoint(tracking_uri: str) -> str | None:
    """The champion's checkpoint; None if there is none yet. Raises TrackingError."""
    with tracking_errors(tracking_uri, "cannot look up the champion"):
        client = open_client(tracking_uri)
        if not _is_registered(client):
            return None
        version = client.get_registered_model(POLICY).aliases.get(CHAMPION)
        return client.get_model_version(POLICY, version).tags[CHECKPOINT_TAG] if version else None


def _is_registered(client: Any) -> bool:
    return bool(client.search_registered_models(f"name = '{POLICY}'", max_results=1))


def _find_version(client: Any, checkpoint_id: str) -> str | None:
    found = client.search_model_versions(f"name = '{POLICY}' AND tags.{CHECKPOINT_TAG} = '{checkpoint_id}'")
    return str(found[0].version) if found else None


def _create_version(client: Any, tracking_uri: str, checkpoint_id: str) -> str:
    from mlflow.exceptions import MlflowException

    model_id = find_logged_model(tracking_uri, checkpoint_id)
    if model_id is None:
        raise TrackingError(
            f"MLflow at {tracking_uri} has no model of {checkpoint_id}: materialize its asset again with this "
            "tracking store, then evaluate it"
        )
    if not _is_registered(client):
        try:
            client.create_registered_model(POLICY, description="The policies; the alias `champion` is the best so far.")
        except MlflowException as error:  # another process was faster
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    model = client.get_logged_model(model_id)
    with _as_default_store(tracking_uri):
        version = client.create_model_version(
            POLICY,
            source=model.model_uri,
            run_id=model.source_run_id,
            tags={CHECKPOINT_TAG: checkpoint_id, "path": model.params.get("path", "")},
            model_id=model_id,
        )
    return str(version.version)


@contextmanager
def _as_default_store(tracking_uri: str) -> Iterator[None]:
    """Sets the process's default store: MLflow's registry in a database looks up a LoggedModel there, not in the
    client's store. A server has only one store."""
    import mlflow

    if not tracking_uri.startswith(SQLITE):
        yield
        return
    with _DEFAULT_STORE:
        # With None, MLflow also removes the variable MLFLOW_TRACKING_URI, which it has set for child processes.
        before: Any = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        mlflow.set_tracking_uri(tracking_uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)
