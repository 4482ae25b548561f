"""Evaluations: every checkpoint on every requested suite, one partition each; then a leaderboard, the champion, and a
report."""

from dataclasses import asdict

import dagster as dg

from assets.checkpoints import checkpoint_id_of
from assets.keys import PREFIX, key_of
from assets.links import log_links
from assets.pools import EVALUATION
from assets.retries import FAULT_RETRIES, only_after_faults
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.leaderboard_rows import leaderboard_rows
from osworld_pipeline.evaluation.scores import CheckpointScore, read_scores
from osworld_pipeline.evaluation.suite_files import suite_names
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.remote.status import push_after
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.registry import register_checkpoint
from osworld_pipeline.runs.evaluate.champion import choose_champion
from osworld_pipeline.runs.evaluate.leaderboard import read_leaderboard
from osworld_pipeline.runs.evaluate.plan import EvaluationJob, EvaluationPlan, TaskChoice, load_suite, plan_evaluation
from osworld_pipeline.runs.job import Policy
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.web.reports.leaderboard_markdown import leaderboard_markdown
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource, configured_state
from resources.tracking import TrackingResource

GROUP = "evaluation"
CHECKPOINT_ASSETS = [
    "base_checkpoint",
    "sft_checkpoint",
    "flywheel_checkpoint",
    "gspo_phase1_checkpoint",
    "gspo_phase2_checkpoint",
]
CHECKPOINTS = dg.DynamicPartitionsDefinition(name="_".join([*PREFIX, "checkpoints"]))
"""Checkpoint ids; a sensor adds new ones. All code locations of an instance share this name, so it has the prefix."""
SUITES = dg.StaticPartitionsDefinition(list(suite_names(StateResource(path=configured_state()).dir().suites)))
"""Names of suites; the user's suites are read when the code location is loaded."""
PARTITIONS = dg.MultiPartitionsDefinition({"checkpoint": CHECKPOINTS, "suite": SUITES})


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"x11", "mlflow"},
    pool=EVALUATION,
    deps=[key_of(name) for name in CHECKPOINT_ASSETS],
    partitions_def=PARTITIONS,
    retry_policy=FAULT_RETRIES,
)
@only_after_faults
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
    """Success of one checkpoint on one suite; a rerun runs only episodes that are missing or ended in a fault."""
    settings, folder = recipe.load(), state.dir()
    checkpoint_id, suite_name = partition_of(context)
    checkpoint = register_checkpoint(folder, checkpoint_id)
    suite = load_suite(folder, settings, suite_name)
    plan = plan_evaluation(settings, checkpoint_id, suite=suite)
    is_done = len(plan.finished(folder)) == len(plan.episodes)
    if not is_done or tracking.run_id_of(folder, plan.stage_key) is None:
        params = {"checkpoint_id": checkpoint_id, "suite": suite.name, "suite_digest": suite.digest}
        params |= settings.evaluation.model_dump(mode="json")
        with tracking.stage(context, folder, stage="evaluation", stage_key=plan.stage_key, params=params) as run:
            run.log_dataset(f"suite_{suite.name}", suite.digest, suite.name)
            if not is_done:
                run_ids = {"dagster": context.run.run_id, "mlflow": run.run_id}
                with desktops.serve(folder, settings, run_id=context.run.run_id) as servers:
                    log_links(context, tracking, run, servers)
                    job = EvaluationJob(
                        recipe=settings,
                        state_root=folder.root,
                        servers=servers,
                        engine_token=engine.token,
                        checkpoints=(Policy.of(checkpoint, run_ids),),
                        tasks=TaskChoice(suite=suite.name),
                    )
                    launcher.launch(context, "evaluate", job, progress.listener(context, "evaluate"), state=folder)
            # A milestone or an external checkpoint was not reported to MLflow by a run of its own.
            where = checkpoint.path if is_address(checkpoint.path) else folder.root / checkpoint.path
            run.log_checkpoint(checkpoint, folder=where)
            run.log_evaluation(checkpoint_id, mlflow_figures(_score(folder, plan, settings)))
    rebuild_catalog(folder)
    push_after(folder, state.remote, context.log.warning)
    return evaluation_result(_score(folder, plan, settings), plan, mlflow_url=tracking.url_of(folder, plan.stage_key))


def partition_of(context: dg.AssetExecutionContext) -> tuple[str, str]:
    """Checkpoint id and suite name."""
    assert isinstance(context.partition_key, dg.MultiPartitionKey), "evaluations are partitioned by two keys"
    keys = context.partition_key.keys_by_dimension
    return keys["checkpoint"], keys["suite"]


def evaluation_result(
    score: CheckpointScore, plan: EvaluationPlan, *, mlflow_url: str | None = None
) -> dg.MaterializeResult:
    return dg.MaterializeResult(
        metadata={
            "success": score.success_rate if score.n else "no valid episode",
            "interval": f"{score.low:.1%} to {score.high:.1%}",
            "strict success": score.strict.value,
            "episodes": score.n,
            "faults": score.num_faults,
            **_parity_metadata(score),
            "stage_key": plan.stage_key,
            "suite digest": plan.suite_digest,
            **({"mlflow": dg.MetadataValue.url(mlflow_url)} if mlflow_url else {}),
        },
        data_version=dg.DataVersion(f"{plan.stage_key}-{score.successes}-{score.n}"),
    )


@dg.asset(key_prefix=PREFIX, group_name=GROUP, kinds={"duckdb"}, pool="catalog", deps=[evaluations])
def leaderboard(state: StateResource, recipe: RecipeResource) -> dg.MaterializeResult:
    """Checkpoints by success, one table for each kind of evaluation: success over the valid episodes, with its
    interval, and over all episodes that were run (strict); changes against the parent and the best; and the cost of a
    success."""
    folder, settings = state.dir(), recipe.load()
    board = read_leaderboard(folder, confidence=settings.evaluation.confidence)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": sum(len(table.rows) for table in board.tables),
            "leaderboard": dg.MetadataValue.md(leaderboard_markdown(board)),
            "rows": dg.MetadataValue.json(leaderboard_rows(board)),
        }
    )


@dg.asset(
    key_prefix=PREFIX,
    group_name=GROUP,
    kinds={"mlflow"},
    pool="catalog",
    deps=[leaderboard],
    retry_policy=FAULT_RETRIES,
)
@only_after_faults
def champion(
    context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource, tracking: TrackingResource
) -> dg.MaterializeResult:
    """The best trained checkpoint on the recipe's held-out tasks, as MLflow's alias `champion`. The first champion is
    the one with the highest success; after that, it changes only if a paired test shows that another is better."""
    folder = state.dir()
    choice = choose_champion(folder, recipe.load(), current=tracking.champion(folder))
    if choice.checkpoint_id is not None and choice.is_new:
        tracking.set_champion(folder, choice.checkpoint_id)
    context.log.info(choice.reason)
    return dg.MaterializeResult(
        metadata={
            "checkpoint_id": choice.checkpoint_id or "none",
            "is new": choice.is_new,
            "reason": choice.reason,
        }
    )


@dg.asset(
    key_prefix=PREFIX, group_name=GROUP, kinds={"html"}, pool="catalog", deps=[leaderboard], retry_policy=FAULT_RETRIES
)
@only_after_faults
def evaluation_report(
    context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource, tracking: TrackingResource
) -> dg.MaterializeResult:
    """Self-contained HTML pages: scores with intervals, each training run, each suite, and an index of them."""
    from osworld_pipeline.runs.evaluate.report import (
        make_all_reports,  # loads templates and images, so it is not imported when definitions are loaded
    )

    folder = state.dir()
    ids = [checkpoint.checkpoint_id for checkpoint in latest_checkpoints(context, state)]
    report, *others, index = make_all_reports(
        folder, recipe.load(), checkpoint_ids=ids, stage_keys=ids, tracking_uri=tracking.resolve(folder),
        say=context.log.warning,
    )  # fmt: skip
    return dg.MaterializeResult(
        metadata={
            "report": dg.MetadataValue.path(str(report)),
            "index": dg.MetadataValue.path(str(index)),
            "other pages": [path.name for path in others],
        }
    )


def latest_checkpoints(context: dg.AssetExecutionContext, state: StateResource) -> list[Checkpoint]:
    """The current checkpoints of the checkpoint assets, the base first. A flywheel without a round has the SFT
    checkpoint, which is listed once. Checkpoints of another state folder of the instance are left out."""
    latest = context.instance.get_latest_materialization_event
    ids = dict.fromkeys(checkpoint_id_of(context, asset) for asset in CHECKPOINT_ASSETS if latest(key_of(asset)))
    known = {checkpoint.checkpoint_id: checkpoint for checkpoint in read_checkpoints(state.dir())}
    if elsewhere := [checkpoint_id for checkpoint_id in ids if checkpoint_id not in known]:
        context.log.warning(f"left out, because they are not in {state.dir().root}: {', '.join(elsewhere)}")
    return [known[checkpoint_id] for checkpoint_id in ids if checkpoint_id in known]


def _score(state: StateDir, plan: EvaluationPlan, recipe: Recipe) -> CheckpointScore:
    (score,) = read_scores(state, confidence=recipe.evaluation.confidence, stage_keys=[plan.stage_key])
    return score


def _parity_metadata(score: CheckpointScore) -> dict[str, float]:
    if score.parity is None:
        return {}
    return {"parity mean difference": score.parity.mean_diff, "parity largest difference": score.parity.max_diff}


def mlflow_figures(score: CheckpointScore) -> dict[str, float]:
    parity = {} if score.parity is None else {f"eval/parity_{name}": v for name, v in asdict(score.parity).items()}
    return {
        "eval/success_rate": score.success_rate,
        "eval/strict_success_rate": score.strict.value,
        "eval/interval_low": score.low,
        "eval/interval_high": score.high,
        "eval/num_episodes": float(score.n),
        "eval/num_faults": float(score.num_faults),
        "eval/mean_turns": score.mean_turns,
        **parity,
    }


ASSETS = [evaluations, leaderboard, champion, evaluation_report]
