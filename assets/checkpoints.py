"""Checkpoints: a base model, SFT on demonstrations, the flywheel, GSPO phase 1 (explore) and phase 2 (stabilise)."""

from dataclasses import asdict
from pathlib import Path

import dagster as dg

from assets.stage import StageServices, checkpoint_result, run_stage, try_stage
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.flywheel_plan import FlywheelResult, Round, walk_flywheel
from osworld_pipeline.runs.stages import training_data_digest
from osworld_pipeline.tables.checkpoints import read_checkpoint_row, read_checkpoints
from osworld_pipeline.tables.preview import markdown_table
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

GROUP = "checkpoints"


def parent_of(context: dg.AssetExecutionContext, asset: str, state: StateResource) -> Checkpoint:
    """The checkpoint that `asset` last materialized."""
    event = context.instance.get_latest_materialization_event(dg.AssetKey(asset))
    if event is None or event.asset_materialization is None:
        raise dg.Failure(f"{asset} has no checkpoint yet: materialize it first", allow_retries=False)
    checkpoint_id = str(event.asset_materialization.metadata["checkpoint_id"].value)
    return read_checkpoint_row(state.dir(), checkpoint_id)


@dg.asset(group_name=GROUP, kinds={"huggingface", "pytorch"}, pool="trainer")
def base_checkpoint(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """The model before any training: a tiny random Qwen3-VL, or a published one."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
    checkpoint = run_stage(
        context, services, stage=Stage.BASE, program="make_base", recipe=settings, state=folder, parent=None,
        data_digest="",
    )  # fmt: skip
    return checkpoint_result(checkpoint, folder)


@dg.asset(
    group_name=GROUP,
    kinds={"huggingface", "pytorch"},
    pool="trainer",
    deps=["base_checkpoint", "replay_buffer", "verified_replay"],
)
def sft_checkpoint(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Supervised fine-tuning on the demonstrations of the replay buffer, assistant tokens only."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
    checkpoint = run_stage(
        context, services, stage=Stage.SFT, program="train_sft", recipe=settings, state=folder,
        parent=parent_of(context, "base_checkpoint", state),
        data_digest=training_data_digest(folder, ["replay_buffer"], replay=settings.replay, sft=settings.sft),
    )  # fmt: skip
    return checkpoint_result(checkpoint, folder)


@dg.asset(
    group_name=GROUP,
    kinds={"huggingface", "pytorch", "x11"},
    pool="trainer",
    deps=["sft_checkpoint", "replay_buffer", "train_tasks", "verified_replay"],
)
def flywheel_checkpoint(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Rollouts, those with enough raw task reward kept, SFT on them, and again while success rises. Each round is a
    checkpoint of its own; without a round, or where none was better, this stands for the SFT checkpoint itself."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
    sft = parent_of(context, "sft_checkpoint", state)
    tables = ["replay_buffer", "train_tasks"] if settings.flywheel.with_demonstrations else ["train_tasks"]
    data_digest = training_data_digest(folder, tables, replay=settings.replay, sft=settings.sft)

    def run_round(one: Round) -> None:
        try_stage(
            context, services, stage=Stage.FLYWHEEL, program="flywheel", recipe=settings, state=folder,
            parent=one.parent, data_digest=data_digest, desktops=desktops, engine=engine,
            more={"previous": asdict(one.previous) if one.previous else None},
        )  # fmt: skip

    result = walk_flywheel(folder, settings, sft, data_digest=data_digest, run_round=run_round)
    return flywheel_result(result, folder)


def flywheel_result(result: FlywheelResult, state: StateDir) -> dg.MaterializeResult:
    shown = checkpoint_result(result.checkpoint, state)
    rows = [
        (one.number, one.parent.checkpoint_id, f"{one.measured.success_rate:.1%}", one.measured.num_kept,
         one.measured.num_valid, one.checkpoint.checkpoint_id if one.checkpoint else "none")
        for one in result.rounds if one.measured
    ]  # fmt: skip
    columns = ("round", "rolled out", "success", "kept", "graded", "made")
    about = {
        "rounds": len(result.rounds),
        "by round": dg.MetadataValue.md(markdown_table(columns, rows)),
        "stopped": result.stopped or ("all rounds were run" if rows else "the recipe has no round"),
    }
    return dg.MaterializeResult(metadata={**(shown.metadata or {}), **about}, data_version=shown.data_version)


def build_gspo_asset(stage: Stage, parent_asset: str, description: str) -> dg.AssetsDefinition:
    @dg.asset(
        name=f"{stage}_checkpoint",
        group_name=GROUP,
        kinds={"huggingface", "pytorch", "x11"},
        pool="trainer",
        deps=[parent_asset, "replay_buffer", "train_tasks", "verified_replay"],
        description=description,
    )
    def gspo_checkpoint(
        context: dg.AssetExecutionContext,
        state: StateResource,
        recipe: RecipeResource,
        desktops: DesktopsResource,
        engine: EngineResource,
        launcher: Launcher,
        tracking: TrackingResource,
        progress: ProgressResource,
    ) -> dg.MaterializeResult:
        settings, folder = recipe.load(), state.dir()
        services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
        checkpoint = run_stage(
            context, services, stage=stage, program="train_gspo", recipe=settings, state=folder,
            parent=parent_of(context, parent_asset, state), desktops=desktops, engine=engine,
            data_digest=training_data_digest(folder, ["replay_buffer", "train_tasks"], replay=settings.replay),
        )  # fmt: skip
        return checkpoint_result(checkpoint, folder)

    return gspo_checkpoint


gspo_phase1_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE1,
    "flywheel_checkpoint",
    "GSPO at a higher temperature: explore, replay joining groups that all fail.",
)
gspo_phase2_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE2, "gspo_phase1_checkpoint", "GSPO at a lower temperature: stabilise."
)

ASSETS = [base_checkpoint, sft_checkpoint, flywheel_checkpoint, gspo_phase1_checkpoint, gspo_phase2_checkpoint]


@dg.asset_check(asset="gspo_phase2_checkpoint", description="Every checkpoint but the base has a parent that is there.")
def no_orphan_checkpoint(state: StateResource) -> dg.AssetCheckResult:
    checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state.dir())}
    orphans = [c.checkpoint_id for c in checkpoints.values() if c.parent_id and c.parent_id not in checkpoints]
    missing = [c.checkpoint_id for c in checkpoints.values() if not (state.dir().root / Path(c.path)).exists()]
    return dg.AssetCheckResult(
        passed=not orphans and not missing, metadata={"orphans": orphans, "without weights": missing}
    )


CHECKS = [no_orphan_checkpoint]
