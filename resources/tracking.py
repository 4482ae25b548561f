"""MLflow for assets: each stage's run carries the Dagster run id."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.lineage.tracking import StageRun, find_run, stage_run


class TrackingResource(dg.ConfigurableResource):
    """An MLflow tracking store."""

    uri: str = Field(default="", description="Tracking URI; empty is the sqlite file in the state folder.")

    def resolve(self, state: StateDir) -> str:
        return self.uri or f"sqlite:///{state.mlflow_db}"

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
        tags = {"dagster.run_id": context.run.run_id, "dagster.asset": context.asset_key.to_user_string()}
        with stage_run(self.resolve(state), stage=stage, stage_key=stage_key, params=params, tags=tags) as run:
            yield run

    def run_id_of(self, state: StateDir, stage_key: str) -> str | None:
        return find_run(self.resolve(state), stage_key)
