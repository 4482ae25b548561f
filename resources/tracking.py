"""MLflow for assets: the runs of each stage have Dagster's ids and a link to its run, and Dagster has a link to
MLflow."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tracking.client import open_client, run_url, tracking_errors
from osworld_pipeline.tracking.code import code_origin
from osworld_pipeline.tracking.models import champion_checkpoint, register_champion
from osworld_pipeline.tracking.runs import StageRun, find_run, metric_history, stage_run

URI_VARIABLE = "MLFLOW_TRACKING_URI"
MLFLOW_URL = "http://127.0.0.1:5000"
DAGSTER_URL = "http://127.0.0.1:3000"


class TrackingResource(dg.ConfigurableResource):
    """An MLflow tracking store."""

    uri: str = Field(
        default="", description=f"Tracking URI; empty: {URI_VARIABLE}, or else the SQLite file in the state folder."
    )
    ui_url: str = Field(
        default="", description=f"URL of MLflow's UI; empty: the tracking URI if that is a server, else {MLFLOW_URL}."
    )
    dagster_url: str = Field(default=DAGSTER_URL, description="URL of Dagster's UI.")

    @property
    def given_uri(self) -> str:
        """Empty if the configuration and the environment have none."""
        return self.uri or dg.EnvVar(URI_VARIABLE).get_value() or ""

    @property
    def is_server(self) -> bool:
        return self.given_uri.startswith(("http://", "https://"))

    @property
    def pages_url(self) -> str:
        """MLflow's UI."""
        return self.ui_url or (self.given_uri if self.is_server else MLFLOW_URL)

    def resolve(self, state: StateDir) -> str:
        return self.given_uri or state.mlflow_uri

    @contextmanager
    def stage(
        self,
        context: dg.AssetExecutionContext,
        state: StateDir,
        *,
        stage: str,
        stage_key: str,
        params: Mapping[str, Any],
    ) -> Iterator[StageRun]:
        """Raises TrackingError if MLflow cannot be reached at the start."""
        with stage_run(
            self.resolve(state),
            stage=stage,
            stage_key=stage_key,
            params=params,
            tags=self.tags(context),
            unsent=state.mlflow_db.parent / "unsent",
            say=context.log.warning,
        ) as run:
            yield run

    def tags(self, context: dg.AssetExecutionContext) -> dict[str, str]:
        """Tags of an MLflow run about Dagster and the code."""
        run_id, code = context.run.run_id, code_origin()
        link = f"{self.dagster_url.rstrip('/')}/runs/{run_id}"
        tags = {
            "dagster.run_id": run_id,
            "dagster.run_url": link,
            "dagster.job": context.run.job_name,
            "dagster.asset": context.asset_key.to_user_string(),
            "code_version": code.version,
            "mlflow.note.content": f"[Dagster run {run_id}]({link})",
        }
        if context.has_partition_key:
            tags["dagster.partition"] = str(context.partition_key)
        if code.is_dirty is not None:
            tags |= {"mlflow.source.git.commit": code.version, "is_code_dirty": str(code.is_dirty)}
        return tags

    def run_id_of(self, state: StateDir, stage_key: str) -> str | None:
        return find_run(self.resolve(state), stage_key)

    def url_of(self, state: StateDir, stage_key: str) -> str | None:
        """The page of a stage in MLflow's UI; None if it was not started. Raises TrackingError."""
        uri = self.resolve(state)
        run_id = find_run(uri, stage_key)
        if run_id is None:
            return None
        with tracking_errors(uri, f"cannot look up the run of {stage_key}"):
            return run_url(self.pages_url, open_client(uri).get_run(run_id).info.experiment_id, run_id)

    def run_url_of(self, run: StageRun) -> str:
        """The page of a running stage in MLflow's UI; sends no request."""
        return run.url(self.pages_url)

    def history_of(self, state: StateDir, stage_key: str, names: Sequence[str]) -> list[tuple[str, int, float]]:
        """(metric, update, value) of a stage. Raises TrackingError."""
        with tracking_errors(self.resolve(state), f"cannot read the curves of {stage_key}"):
            return metric_history(self.resolve(state), stage_key, names)

    def champion(self, state: StateDir) -> str | None:
        """The checkpoint that MLflow's alias `champion` points to. Raises TrackingError."""
        return champion_checkpoint(self.resolve(state))

    def set_champion(self, state: StateDir, checkpoint_id: str) -> None:
        """Moves the alias to this checkpoint. Raises TrackingError."""
        register_champion(self.resolve(state), checkpoint_id)
