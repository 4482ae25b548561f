"""Evaluations: every checkpoint of the road on the held-out tasks, and a report people can read."""

from contextlib import ExitStack
from typing import Any

import dagster as dg

from assets.checkpoints import parent_of
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.scores import CheckpointScore, read_scores
from osworld_pipeline.lineage.tracking import StageRun
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from osworld_pipeline.runs.report import make_report
from osworld_pipeline.tables.catalog import rebuild_catalog
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource
from resources.tracking import TrackingResource

GROUP = "evaluation"
CHECKPOINT_ASSETS = [
    "base_checkpoint",
    "sft_checkpoint",
    "flywheel_checkpoint",
    "gspo_phase1_checkpoint",
    "gspo_phase2_checkpoint",
]


@dg.asset(group_name=GROUP, kinds={"x11", "mlflow"}, pool="trainer", deps=CHECKPOINT_ASSETS)
def evaluations(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    tracking: TrackingResource,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Held-out success of each checkpoint; a rerun runs only what is missing or ended in a fault."""
    settings, folder = recipe.load(), state.dir()
    checkpoints = _distinct_checkpoints(context, state)
    with ExitStack() as runs:
        pending: list[tuple[Checkpoint, StageRun]] = []
        for checkpoint in checkpoints:
            plan = plan_evaluation(settings, checkpoint.checkpoint_id)
            is_done = len(plan.finished(folder)) == len(plan.episodes)
            if not is_done or tracking.run_id_of(folder, plan.stage_key) is None:
                params = {"checkpoint_id": checkpoint.checkpoint_id, "suite_digest": plan.suite_digest}
                params |= settings.evaluation.model_dump(mode="json")
                stage = tracking.stage(context, folder, stage="evaluation", stage_key=plan.stage_key, params=params)
                pending.append((checkpoint, runs.enter_context(stage)))
        if pending:
            with desktops.serve(folder, settings) as servers:
                job = evaluation_job(context, settings, folder, servers, pending)
                job["engine_token"] = engine.token
                launcher.launch(context, "evaluate", job, progress.listener(context, "evaluate"), state=folder)
        for checkpoint, run in pending:
            run.log_evaluation(checkpoint.checkpoint_id, _figures(folder, checkpoint, settings))
    rebuild_catalog(folder)
    keys = [plan_evaluation(settings, checkpoint.checkpoint_id).stage_key for checkpoint in checkpoints]
    scores = read_scores(folder, confidence=settings.evaluation.confidence, stage_keys=keys)
    return dg.MaterializeResult(
        metadata={
            "checkpoints": len(scores),
            "scores": dg.MetadataValue.md(_as_markdown(scores)),
            **{f"{score.stage} success": score.success_rate for score in scores if score.n},
        }
    )


@dg.asset(group_name=GROUP, kinds={"html"}, pool="catalog", deps=[evaluations])
def evaluation_report(
    context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource, tracking: TrackingResource
) -> dg.MaterializeResult:
    """One self-contained HTML page: scores with intervals, curves, what the best episodes saw."""
    folder = state.dir()
    ids = [checkpoint.checkpoint_id for checkpoint in _distinct_checkpoints(context, state)]
    path = make_report(folder, recipe.load(), checkpoint_ids=ids, tracking_uri=tracking.resolve(folder))
    return dg.MaterializeResult(metadata={"report": dg.MetadataValue.path(str(path))})


def _distinct_checkpoints(context: dg.AssetExecutionContext, state: StateResource) -> list[Checkpoint]:
    """A flywheel without a round stands for the SFT checkpoint, which is evaluated once."""
    found = [parent_of(context, asset, state) for asset in CHECKPOINT_ASSETS]
    return list({checkpoint.checkpoint_id: checkpoint for checkpoint in found}.values())


def evaluation_job(
    context: dg.AssetExecutionContext,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    pending: list[tuple[Checkpoint, StageRun]],
) -> dict[str, Any]:
    """What the program `evaluate` is told."""
    return {
        "recipe": recipe.model_dump(mode="json"),
        "state_root": str(state.root),
        "servers": servers.as_job(),
        "checkpoints": [
            {
                "checkpoint_id": checkpoint.checkpoint_id,
                "stage": str(checkpoint.stage),
                "path": checkpoint.path,
                "run_ids": {"dagster": context.run.run_id, "mlflow": run.run_id},
            }
            for checkpoint, run in pending
        ],
    }


def _figures(state: StateDir, checkpoint: Checkpoint, recipe: Recipe) -> dict[str, float]:
    key = plan_evaluation(recipe, checkpoint.checkpoint_id).stage_key
    (score,) = read_scores(state, confidence=recipe.evaluation.confidence, stage_keys=[key])
    return {
        "eval/success_rate": score.success_rate,
        "eval/interval_low": score.low,
        "eval/interval_high": score.high,
        "eval/num_episodes": float(score.n),
        "eval/num_faults": float(score.num_faults),
        "eval/mean_turns": score.mean_turns,
    }


def _as_markdown(scores: list[CheckpointScore]) -> str:
    lines = ["| stage | success | interval | episodes | faults |", "|---|---|---|---|---|"]
    lines += [
        f"| {score.stage} | {score.success_rate:.1%} | {score.low:.1%} to {score.high:.1%} | "
        f"{score.successes}/{score.n} | {score.num_faults} |"
        for score in scores
    ]
    return "\n".join(lines)


ASSETS = [evaluations, evaluation_report]
