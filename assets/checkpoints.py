"""Checkpoints: a base model, SFT on demonstrations, GSPO phase 1 (explore) and phase 2 (stabilise)."""

from pathlib import Path

import dagster as dg

from assets.stage import StageServices, checkpoint_result, run_stage
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.runs.stages import training_data_digest
from osworld_pipeline.tables.checkpoints import read_checkpoint_row, read_checkpoints
from resources.desktops import DesktopsResource
from resources.launcher import LocalLauncher
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
    launcher: LocalLauncher,
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
    launcher: LocalLauncher,
    tracking: TrackingResource,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Supervised fine-tuning on the demonstrations of the replay buffer, assistant tokens only."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
    checkpoint = run_stage(
        context, services, stage=Stage.SFT, program="train_sft", recipe=settings, state=folder,
        parent=parent_of(context, "base_checkpoint", state),
        data_digest=training_data_digest(folder, ["replay_buffer"], replay=settings.replay),
    )  # fmt: skip
    return checkpoint_result(checkpoint, folder)


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
        launcher: LocalLauncher,
        tracking: TrackingResource,
        progress: ProgressResource,
    ) -> dg.MaterializeResult:
        settings, folder = recipe.load(), state.dir()
        services = StageServices(launcher=launcher, tracking=tracking, progress=progress)
        checkpoint = run_stage(
            context, services, stage=stage, program="train_gspo", recipe=settings, state=folder,
            parent=parent_of(context, parent_asset, state), desktops=desktops,
            data_digest=training_data_digest(folder, ["replay_buffer", "train_tasks"], replay=settings.replay),
        )  # fmt: skip
        return checkpoint_result(checkpoint, folder)

    return gspo_checkpoint


gspo_phase1_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE1, "sft_checkpoint", "GSPO at a higher temperature: explore, replay joining groups that all fail."
)
gspo_phase2_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE2, "gspo_phase1_checkpoint", "GSPO at a lower temperature: stabilise."
)

ASSETS = [base_checkpoint, sft_checkpoint, gspo_phase1_checkpoint, gspo_phase2_checkpoint]


@dg.asset_check(asset="gspo_phase2_checkpoint", description="Every checkpoint but the base has a parent that is there.")
def no_orphan_checkpoint(state: StateResource) -> dg.AssetCheckResult:
    checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state.dir())}
    orphans = [c.checkpoint_id for c in checkpoints.values() if c.parent_id and c.parent_id not in checkpoints]
    missing = [c.checkpoint_id for c in checkpoints.values() if not (state.dir().root / Path(c.path)).exists()]
    return dg.AssetCheckResult(
        passed=not orphans and not missing, metadata={"orphans": orphans, "without weights": missing}
    )


CHECKS = [no_orphan_checkpoint]
