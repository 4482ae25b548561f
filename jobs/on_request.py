"""Jobs on request that make no asset: an evaluation on chosen tasks, a collection of rollouts."""

import dagster as dg
from pydantic import Field

from assets.pools import EVALUATION
from assets.retries import FAULT_RETRIES, only_after_faults
from osworld_pipeline.evaluation.suite_files import HELDOUT
from osworld_pipeline.remote.status import push_after
from osworld_pipeline.runs.checkpoints.registry import register_checkpoint
from osworld_pipeline.runs.collect.plan import ORACLE, TRAIN, CollectionJob
from osworld_pipeline.runs.evaluate.plan import EvaluationJob, TaskChoice, load_tasks, plan_evaluation
from osworld_pipeline.runs.job import Policy
from osworld_pipeline.tables.catalog import rebuild_catalog
from resources.desktops import DesktopsResource
from resources.engine import EngineResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

EVALUATE_TASKS, COLLECT_ROLLOUTS = "evaluate_tasks", "collect_rollouts"


class TaskRequest(dg.Config):
    tasks_file: str = Field(default="", description="Path of a suite file; overrides `suite`.")
    max_tasks: int | None = Field(default=None, ge=1, description="Use only this many of the first tasks; None: all.")


class EvaluationRequest(TaskRequest):
    checkpoint_id: str = Field(description="Id of the checkpoint.")
    suite: str = Field(default=HELDOUT, description="Name of a suite.")


class CollectionRequest(TaskRequest):
    checkpoint_id: str = Field(description=f"Id of a checkpoint, or `{ORACLE}` for the scripts that solve the tasks.")
    suite: str = Field(default=TRAIN, description=f"Name of a suite, or `{TRAIN}` for the recipe's training tasks.")
    num_samples: int = Field(default=1, ge=1, description="Episodes of each task.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")


@dg.op(pool=EVALUATION, retry_policy=FAULT_RETRIES)
@only_after_faults
def evaluate_on_tasks(
    context: dg.OpExecutionContext,
    config: EvaluationRequest,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    progress: ProgressResource,
) -> None:
    """Runs the missing episodes, and stores each as it ends."""
    folder, settings = state.dir(), recipe.load()
    checkpoint = register_checkpoint(folder, config.checkpoint_id)
    plan = plan_evaluation(settings, checkpoint.checkpoint_id, suite=load_tasks(folder, settings, choice_of(config)))
    if len(plan.finished(folder)) < len(plan.episodes):
        run_ids = {"dagster": context.run_id}
        as_asset = dg.AssetExecutionContext(context)  # the context type that launcher and progress expect
        with desktops.serve(folder, settings, run_id=context.run.run_id) as servers:
            job = EvaluationJob(
                recipe=settings,
                state_root=folder.root,
                servers=servers,
                engine_token=engine.token,
                checkpoints=(Policy.of(checkpoint, run_ids),),
                tasks=choice_of(config),
            )
            launcher.launch(as_asset, "evaluate", job, progress.listener(as_asset, "evaluate"), state=folder)
    rebuild_catalog(folder)
    push_after(folder, state.remote, context.log.warning)


@dg.op(pool=EVALUATION, retry_policy=FAULT_RETRIES)
@only_after_faults
def collect_on_tasks(
    context: dg.OpExecutionContext,
    config: CollectionRequest,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    engine: EngineResource,
    launcher: Launcher,
    progress: ProgressResource,
) -> None:
    """Runs the missing episodes, and stores each as it ends; the log lists their outcomes."""
    folder, settings = state.dir(), recipe.load()
    is_oracle = config.checkpoint_id == ORACLE
    checkpoint = None if is_oracle else register_checkpoint(folder, config.checkpoint_id)
    as_asset = dg.AssetExecutionContext(context)
    with desktops.serve(folder, settings, run_id=context.run.run_id) as servers:
        job = CollectionJob(
            recipe=settings,
            state_root=folder.root,
            run_ids={"dagster": context.run_id},
            servers=servers,
            engine_token=engine.token,
            checkpoint=Policy(checkpoint_id=ORACLE) if checkpoint is None else Policy.of(checkpoint),
            tasks=choice_of(config),
            num_samples=config.num_samples,
            temperature=config.temperature,
        )
        outcomes = launcher.launch(as_asset, "collect", job, progress.listener(as_asset, "collect"), state=folder)
    context.log.info(f"episodes by outcome: {outcomes}")
    rebuild_catalog(folder)
    push_after(folder, state.remote, context.log.warning)


def choice_of(config: EvaluationRequest | CollectionRequest) -> TaskChoice:
    return TaskChoice(suite=config.suite, tasks_file=config.tasks_file, max_tasks=config.max_tasks)


@dg.job(
    name=EVALUATE_TASKS,
    description="One checkpoint on tasks of a file, or on the first tasks of a suite; resumes task by task.",
)
def evaluate_tasks() -> None:
    evaluate_on_tasks()


@dg.job(
    name=COLLECT_ROLLOUTS,
    description="Rollouts of a checkpoint, or of the oracle, on tasks, for replay and SFT; resumes episode by episode.",
)
def collect_rollouts() -> None:
    collect_on_tasks()
