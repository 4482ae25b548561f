"""Runs a training stage for an asset: finds its checkpoint, or launches its program with MLflow and progress
attached."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import dagster as dg

from assets.links import log_links
from assets.plots import training_curves
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.load import source_lines
from osworld_pipeline.remote.status import push_after
from osworld_pipeline.runs.budget import UNLIMITED, Budget
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint, stage_checkpoint_id, stage_params
from osworld_pipeline.runs.job import Policy, StageJob
from osworld_pipeline.runs.messages import Message, Metrics
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.tracking import TrackingResource


@dataclass(frozen=True, kw_only=True)
class StageServices:
    """The resources that every training asset needs."""

    launcher: Launcher
    tracking: TrackingResource
    progress: ProgressResource
    remote: str = ""
    """The object store to which the state is pushed; empty for none."""


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """The result of a stage."""

    checkpoint: Checkpoint | None
    """Its own checkpoint; if it was stopped, its last milestone, or its parent if it did not run. None if there was no
    data to train on."""
    stopped: str = ""
    """Why it did not finish; empty if it did."""
    is_found: bool = False
    """Its checkpoint existed already; no training was done."""


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
    budget: Budget = UNLIMITED,
) -> dg.MaterializeResult:
    """Makes the checkpoint of `stage`, or finds it by its id, which depends on all relevant inputs. Returns the Dagster
    metadata of the checkpoint and how it was obtained."""
    end = try_stage(
        context, services, stage=stage, program=program, recipe=recipe, state=state, parent=parent,
        data_digest=data_digest, desktops=desktops, engine=engine, budget=budget,
    )  # fmt: skip
    assert end.checkpoint is not None, f"{program} succeeded without a checkpoint"
    shown = checkpoint_result(end.checkpoint, state)
    about: dict[str, Any] = {"was there already": end.is_found}
    if end.stopped:
        about["stopped"] = end.stopped
    if end.checkpoint.stage is stage:
        about |= training_curves(context, services.tracking, state, end.checkpoint)
    return dg.MaterializeResult(metadata={**(shown.metadata or {}), **about}, data_version=shown.data_version)


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
    budget: Budget = UNLIMITED,
    kind: type[StageJob] = StageJob,
    more: Mapping[str, Any] | None = None,
) -> StageEnd:
    """Finds or makes the checkpoint as run_stage does, also for a program that may have no data to train on. `kind`,
    `more`: the model of its job, and the fields that only this model has."""
    parent_id = parent.checkpoint_id if parent else None
    checkpoint_id = stage_checkpoint_id(stage, recipe, parent_id=parent_id, data_digest=data_digest)
    params = stage_params(stage, recipe)
    for line in source_lines(recipe):
        context.log.info(f"recipe {recipe.name}, {line}")
    checkpoint, stopped = read_checkpoint(state, checkpoint_id), ""
    is_found = checkpoint is not None
    if is_found:
        context.log.info(f"nothing to train: {checkpoint_id} exists for the same recipe, parent and data")
    if checkpoint is None and (ended := budget.end_reason(now=time.time())):
        return StageEnd(checkpoint=parent, stopped=f"it did not run: {ended}")
    if checkpoint is None or services.tracking.run_id_of(state, checkpoint_id) is None:
        flat = {**params, "parent_checkpoint_id": parent_id, "data_digest": data_digest}
        with services.tracking.stage(context, state, stage=stage, stage_key=checkpoint_id, params=flat) as run:
            run.log_dataset("replay_and_tasks", data_digest, str(state.tables))

            def on_message(message: Message) -> None:
                if isinstance(message, Metrics):
                    run.log_metrics(message.update, message.metrics)
                services.progress.handle(context, str(stage), message)

            if checkpoint is None:
                with desktops.serve(state, recipe, run_id=context.run.run_id) if desktops else nullcontext() as servers:
                    job = kind(
                        recipe=recipe,
                        state_root=state.root,
                        run_ids={"dagster": context.run.run_id, "mlflow": run.run_id},
                        stage=stage,
                        checkpoint_id=checkpoint_id,
                        parent=Policy.of(parent) if parent else None,
                        data_digest=data_digest,
                        servers=servers,
                        engine_token=engine.token if engine else None,
                        budget=budget,
                        **(more or {}),
                    )
                    log_links(context, services.tracking, run, servers)
                    result = services.launcher.launch(
                        context, program, job, on_message, state=state, num_processes=_num_processes(stage, recipe)
                    )
                stopped = str(result.get("stopped", ""))
                checkpoint = read_checkpoint(state, result["checkpoint_id"] if stopped else checkpoint_id)
            if checkpoint is not None:
                run.log_checkpoint(checkpoint, folder=state.root / checkpoint.path)
    if checkpoint is not None:
        upsert_checkpoint(state, checkpoint)
    rebuild_catalog(state)
    push_after(state, services.remote, context.log.warning)
    return StageEnd(checkpoint=checkpoint, stopped=stopped, is_found=is_found)


def _num_processes(stage: Stage, recipe: Recipe) -> int:
    """Ranks of a stage; the base is created, not trained, by one process."""
    return 1 if stage is Stage.BASE else recipe.trainer.num_processes


def checkpoint_result(checkpoint: Checkpoint, state: StateDir) -> dg.MaterializeResult:
    """The Dagster result of a checkpoint: ids, path, metrics; its data version is the digest of its weights."""
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
