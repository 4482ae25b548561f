"""How an asset runs a training stage: find it done, or launch its program with MLflow and progress attached."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import dagster as dg

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import source_lines
from osworld_pipeline.runs.stages import read_checkpoint, stage_checkpoint_id, stage_params
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.tracking import TrackingResource


@dataclass(frozen=True, kw_only=True)
class StageServices:
    """What every training asset needs of Dagster's resources."""

    launcher: Launcher
    tracking: TrackingResource
    progress: ProgressResource


def run_stage(
    context: dg.AssetExecutionContext,
    services: StageServices,
    *,
    stage: Stage,
    program: str,
    recipe: Recipe,
    state: StateDir,
    parent: Checkpoint | None,
    data_digest: str,
    desktops: DesktopsResource | None = None,
    engine: EngineResource | None = None,
) -> Checkpoint:
    """Makes the checkpoint of `stage`, or finds it: its id says whether anything that matters has changed."""
    checkpoint = try_stage(
        context, services, stage=stage, program=program, recipe=recipe, state=state, parent=parent,
        data_digest=data_digest, desktops=desktops, engine=engine,
    )  # fmt: skip
    assert checkpoint is not None, f"{program} ended well and left no checkpoint"
    return checkpoint


def try_stage(
    context: dg.AssetExecutionContext,
    services: StageServices,
    *,
    stage: Stage,
    program: str,
    recipe: Recipe,
    state: StateDir,
    parent: Checkpoint | None,
    data_digest: str,
    desktops: DesktopsResource | None = None,
    engine: EngineResource | None = None,
    more: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """As run_stage, of a program that may find that there is nothing to train on; `more` joins its job."""
    parent_id = parent.checkpoint_id if parent else None
    checkpoint_id = stage_checkpoint_id(stage, recipe, parent_id=parent_id, data_digest=data_digest)
    params = stage_params(stage, recipe)
    job = {
        "recipe": recipe.model_dump(mode="json"),
        "state_root": str(state.root),
        "stage": str(stage),
        "checkpoint_id": checkpoint_id,
        "parent": {"checkpoint_id": parent.checkpoint_id, "path": parent.path} if parent else None,
        "data_digest": data_digest,
        "engine_token": engine.token if engine else None,
        **(more or {}),
    }
    for line in source_lines(recipe):
        context.log.info(f"recipe {recipe.name}, {line}")
    checkpoint = read_checkpoint(state, checkpoint_id)
    if checkpoint is None or services.tracking.run_id_of(state, checkpoint_id) is None:
        flat = {**params, "parent_checkpoint_id": parent_id, "data_digest": data_digest}
        with services.tracking.stage(context, state, stage=stage, stage_key=checkpoint_id, params=flat) as run:
            run.log_dataset("replay_and_tasks", data_digest, str(state.tables))
            job["run_ids"] = {"dagster": context.run.run_id, "mlflow": run.run_id}

            def on_message(message: Mapping[str, Any]) -> None:
                if message["kind"] == "metrics":
                    run.log_metrics(message["update"], message["metrics"])
                services.progress.hear(context, str(stage), message)

            if checkpoint is None:
                with desktops.serve(state, recipe) if desktops else nullcontext() as servers:
                    job["servers"] = servers.as_job() if servers else None
                    services.launcher.launch(
                        context, program, job, on_message, state=state, num_processes=_num_processes(stage, recipe)
                    )
                checkpoint = read_checkpoint(state, checkpoint_id)
            if checkpoint is not None:
                run.log_checkpoint(checkpoint, folder=state.root / checkpoint.path)
    if checkpoint is not None:
        upsert_checkpoint(state, checkpoint)
    rebuild_catalog(state)
    return checkpoint


def _num_processes(stage: Stage, recipe: Recipe) -> int:
    """The base is made, not trained."""
    return 1 if stage is Stage.BASE else recipe.trainer.num_processes


def checkpoint_result(checkpoint: Checkpoint, state: StateDir) -> dg.MaterializeResult:
    """What Dagster shows of a checkpoint: ids, path, figures; its data version is the digest of its weights."""
    figures = {name: dg.MetadataValue.float(float(value)) for name, value in checkpoint.metrics.items()}
    return dg.MaterializeResult(
        metadata={
            "checkpoint_id": checkpoint.checkpoint_id,
            "parent_id": checkpoint.parent_id or "none",
            "path": dg.MetadataValue.path(str(state.root / checkpoint.path)),
            "num_updates": checkpoint.num_updates,
            "weights_digest": checkpoint.weights_digest,
            **figures,
        },
        data_version=dg.DataVersion(checkpoint.weights_digest),
    )
