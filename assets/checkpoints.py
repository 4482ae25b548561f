"""Checkpoints: a base model, SFT on demonstrations, the flywheel, GSPO phase 1 (explore) and phase 2 (stabilise)."""

import time

import dagster as dg

from assets.keys import PREFIX, key_of
from assets.pools import TRAINER
from assets.retries import FAULT_RETRIES, only_after_faults
from assets.stage import StageServices, checkpoint_result, run_stage, try_stage
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.ids import flywheel_data_digest, gspo_data_digest, training_data_digest
from osworld_pipeline.runs.flywheel.plan import FlywheelJob, FlywheelResult, Round, walk_flywheel
from osworld_pipeline.runs.flywheel.retraining import RETRAINING_TAG
from osworld_pipeline.tables.checkpoints import read_checkpoint_row, read_checkpoints
from osworld_pipeline.tables.preview import markdown_table
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.start import StartResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

GROUP = "checkpoints"


def parent_of(context: dg.AssetExecutionContext, asset: str, state: StateResource) -> Checkpoint:
    """The checkpoint that `asset` materialized in this run, if any; else the last one."""
    return read_checkpoint_row(state.dir(), checkpoint_id_of(context, asset))


def start_or_parent(
    context: dg.AssetExecutionContext,
    stage: Stage,
    asset: str,
    start: StartResource,
    state: StateResource,
    tracking: TrackingResource,
) -> Checkpoint:
    """The checkpoint that `stage` trains: that of the resource `start` if training starts with this stage, else that of
    the asset upstream. Raises as `StartResource.resolve` and `parent_of`."""
    if start.is_start_of(stage):
        return start.resolve(state.dir(), tracking)
    return parent_of(context, asset, state)


def checkpoint_id_of(context: dg.AssetExecutionContext, asset: str) -> str:
    """The id of the checkpoint, as `parent_of` finds it, in any state folder of the instance."""
    found = _made_in(context.run.run_id, asset, context.instance)
    if found is None:
        event = context.instance.get_latest_materialization_event(key_of(asset))
        found = event.asset_materialization if event is not None else None
    if found is None:
        raise dg.Failure(f"{asset} has no checkpoint yet: materialize it first", allow_retries=False)
    return str(found.metadata["checkpoint_id"].value)


def _made_in(run_id: str, asset: str, instance: dg.DagsterInstance) -> dg.AssetMaterialization | None:
    """The materialization of `asset` in this run: a concurrent training run may have made a later one."""
    records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION).records
    made = [record.asset_materialization for record in records]
    return next((one for one in reversed(made) if one is not None and one.asset_key == key_of(asset)), None)


@dg.asset(
    key_prefix=PREFIX, group_name=GROUP, kinds={"huggingface", "pytorch"}, pool=TRAINER, retry_policy=FAULT_RETRIES
)
@only_after_faults
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
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress, remote=state.remote)
    return run_stage(
        context, services, stage=Stage.BASE, program="make_base", recipe=settings, state=folder, parent=None,
        data_digest="",
    )  # fmt: skip


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"huggingface", "pytorch"},
    pool=TRAINER,
    deps=[key_of(name) for name in ("base_checkpoint", "replay_buffer", "verified_replay")],
    retry_policy=FAULT_RETRIES,
)
@only_after_faults
def sft_checkpoint(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
    start: StartResource,
) -> dg.MaterializeResult:
    """Supervised fine-tuning on the demonstrations of the replay buffer, assistant tokens only."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress, remote=state.remote)
    return run_stage(
        context, services, stage=Stage.SFT, program="train_sft", recipe=settings, state=folder,
        parent=start_or_parent(context, Stage.SFT, "base_checkpoint", start, state, tracking),
        data_digest=training_data_digest(folder, ["replay_buffer"], replay=settings.replay, sft=settings.sft),
    )  # fmt: skip


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"huggingface", "pytorch", "x11"},
    pool=TRAINER,
    deps=[key_of(name) for name in ("sft_checkpoint", "replay_buffer", "train_tasks", "verified_replay")],
    retry_policy=FAULT_RETRIES,
)
@only_after_faults
def flywheel_checkpoint(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
    start: StartResource,
) -> dg.MaterializeResult:
    """Rollouts, selection by raw task reward, and SFT on the selected ones, repeated while success rises. Each round
    makes a checkpoint, except a round that stops the flywheel. Without a round, or if none was better, this asset is
    the checkpoint it started from: the SFT checkpoint, or that of the resource `start`."""
    settings, folder = recipe.load(), state.dir()
    services = StageServices(launcher=launcher, tracking=tracking, progress=progress, remote=state.remote)
    parent = start_or_parent(context, Stage.FLYWHEEL, "sft_checkpoint", start, state, tracking)
    if start.is_start_of(Stage.FLYWHEEL):
        context.instance.add_run_tags(context.run.run_id, {RETRAINING_TAG: parent.checkpoint_id})
    data_digest = flywheel_data_digest(folder, settings)
    ran: list[int] = []

    def run_round(one: Round) -> None:
        ran.append(one.number)
        try_stage(
            context, services, stage=Stage.FLYWHEEL, program="flywheel", recipe=settings, state=folder,
            parent=one.parent, data_digest=data_digest, desktops=desktops, engine=engine,
            kind=FlywheelJob,
            more={"previous": one.previous},
        )  # fmt: skip

    def end_reason() -> str:
        return start.budget_left(context, settings, folder).end_reason(now=time.time())

    result = walk_flywheel(
        folder, settings, parent, data_digest=data_digest, run_round=run_round, end_reason=end_reason
    )
    return flywheel_result(result, folder, num_run=len(ran))


def flywheel_result(result: FlywheelResult, state: StateDir, *, num_run: int) -> dg.MaterializeResult:
    """`num_run`: rounds that were run now."""
    shown = checkpoint_result(result.checkpoint, state)
    rows = [
        (one.number, one.parent.checkpoint_id, f"{one.measured.success_rate:.1%}", one.measured.num_kept,
         one.measured.num_valid, one.checkpoint.checkpoint_id if one.checkpoint else "none")
        for one in result.rounds if one.measured
    ]  # fmt: skip
    columns = ("round", "rolled out", "success", "kept", "graded", "made")
    about = {
        "rounds": len(result.rounds),
        "rounds run now": num_run,
        "by round": dg.MetadataValue.md(markdown_table(columns, rows)),
        "stopped": result.stopped or ("all rounds were run" if rows else "the recipe has no round"),
    }
    return dg.MaterializeResult(metadata={**(shown.metadata or {}), **about}, data_version=shown.data_version)


def build_gspo_asset(stage: Stage, parent_asset: str, description: str) -> dg.AssetsDefinition:
    @dg.asset(
        name=f"{stage}_checkpoint",
        key_prefix=PREFIX,
        group_name=GROUP,
        kinds={"huggingface", "pytorch", "x11"},
        pool=TRAINER,
        deps=[key_of(name) for name in (parent_asset, "replay_buffer", "train_tasks", "verified_replay")],
        description=description,
        retry_policy=FAULT_RETRIES,
    )
    @only_after_faults
    def gspo_checkpoint(
        context: dg.AssetExecutionContext,
        state: StateResource,
        recipe: RecipeResource,
        desktops: DesktopsResource,
        engine: EngineResource,
        launcher: Launcher,
        tracking: TrackingResource,
        progress: ProgressResource,
        start: StartResource,
    ) -> dg.MaterializeResult:
        settings, folder = recipe.load(), state.dir()
        services = StageServices(launcher=launcher, tracking=tracking, progress=progress, remote=state.remote)
        return run_stage(
            context, services, stage=stage, program="train_gspo", recipe=settings, state=folder,
            parent=start_or_parent(context, stage, parent_asset, start, state, tracking),
            desktops=desktops, engine=engine,
            data_digest=gspo_data_digest(folder, settings),
            budget=start.budget_left(context, settings, folder),
        )  # fmt: skip

    return gspo_checkpoint


gspo_phase1_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE1,
    "flywheel_checkpoint",
    "GSPO at a higher temperature to explore; replay joins groups in which all fail.",
)
gspo_phase2_checkpoint = build_gspo_asset(
    Stage.GSPO_PHASE2, "gspo_phase1_checkpoint", "GSPO at a lower temperature to stabilise."
)

ASSETS = [base_checkpoint, sft_checkpoint, flywheel_checkpoint, gspo_phase1_checkpoint, gspo_phase2_checkpoint]


@dg.asset_check(
    asset=key_of("gspo_phase2_checkpoint"), description="Every checkpoint has weights, and its parent, if any, exists."
)
def no_orphan_checkpoint(state: StateResource) -> dg.AssetCheckResult:
    checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state.dir())}
    orphans = [c.checkpoint_id for c in checkpoints.values() if c.parent_id and c.parent_id not in checkpoints]
    folders = [c for c in checkpoints.values() if not is_address(c.path)]
    missing = [c.checkpoint_id for c in folders if not (state.dir().root / c.path).exists()]
    return dg.AssetCheckResult(
        passed=not orphans and not missing, metadata={"orphans": orphans, "without weights": missing}
    )


CHECKS = [no_orphan_checkpoint]
