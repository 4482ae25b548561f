"""An MLflow client with timeouts and without log noise. mlflow takes seconds to import, so it is imported only inside
functions."""

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from osworld_pipeline.atomic_io import locked, remove_stale_temps, replacing
from osworld_pipeline.errors import StoreError, TrackingError
from osworld_pipeline.file_locks import uses_lock_files

SQLITE = "sqlite:///"
TABLES_TIMEOUT_S = 120.0
"""Creating the tables takes a few seconds."""
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""MLflow's settings. Its own defaults would report each use to its makers' server, and wait seven times two minutes for
a response."""
NEVER = (400, 404)
"""HTTP status codes for which a retry is useless."""


def import_in_background() -> None:
    """Starts MLflow's import in a thread; `open_client` then waits for the rest of it, and raises its error again."""
    _set_defaults()
    if "mlflow" not in sys.modules:
        threading.Thread(target=_import, name="import of MLflow", daemon=True).start()


def _import() -> None:
    with suppress(Exception):
        importlib.import_module("mlflow")


def _set_defaults() -> None:
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)  # written, not read: MLflow reads its settings from the environment


def open_client(tracking_uri: str) -> Any:
    """A client. A new SQLite database is created with all its tables before it becomes visible. No request is sent to a
    server. Raises StoreError: a database's file system has no locks or refused, or another process takes too long to
    create it."""
    _set_defaults()
    from mlflow import MlflowClient

    database = Path(tracking_uri.removeprefix(SQLITE))
    if tracking_uri.startswith(SQLITE) and uses_lock_files(database.absolute().parent):
        raise StoreError(
            f"MLflow's database {database} would be on a file system without locks, which SQLite needs: set the "
            "tracking resource's uri to an MLflow server, or to sqlite:////PATH on a local disk"
        )
    if tracking_uri.startswith(SQLITE) and not database.exists():
        lock = database.with_name(f".{database.name}.lock")
        with locked(lock, timeout_s=TABLES_TIMEOUT_S, error=StoreError, what=f"MLflow's database {database}"):
            if not database.exists():
                remove_stale_temps(database.parent)
                # A kill during MLflow's dozens of migrations would leave a database that cannot be opened again.
                with replacing(database) as temp:
                    MlflowClient(tracking_uri=f"{SQLITE}{temp}").search_experiments(max_results=1)
    return MlflowClient(tracking_uri=tracking_uri)


@contextmanager
def tracking_errors(tracking_uri: str, what: str) -> Iterator[None]:
    """Converts MLflow's errors to a TrackingError of one sentence. `what`: "cannot open the run of sft-1"."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        way_out = (
            "see its log" if is_final(error) else "start it, or correct the tracking resource's uri, and run again"
        )
        raise TrackingError(f"{what}: MLflow at {tracking_uri} returned: {first_words(error)}; {way_out}") from error


def is_final(error: BaseException) -> bool:
    """Whether MLflow's answer is final, so that a retry would fail again."""
    status = getattr(error, "get_http_status_code", None)
    return status is not None and status() in NEVER


def first_words(error: BaseException, *, limit: int = 200) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def search_everywhere(client: Any) -> list[str]:
    """The ids of all experiments."""
    return [experiment.experiment_id for experiment in client.search_experiments()]


def run_url(base_url: str, experiment_id: str, run_id: str) -> str:
    """The page of a run in MLflow's UI."""
    return f"{base_url.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
