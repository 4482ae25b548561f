"""Evaluates one checkpoint from the command line. A whole suite that is a partition is evaluated through the asset
`evaluations`, like a backfill, so that it is reported to MLflow; other tasks through the job `evaluate_tasks`. Both
record every episode, continue after a stop, and rank."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from assets.evaluations import SUITES
from jobs.on_request import EVALUATE_TASKS, evaluate_on_tasks
from jobs.pipeline import RANK
from osworld_pipeline.cli.in_process.session import open_in_process
from osworld_pipeline.domain.checkpoint import Checkpoint
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.evaluation.result_file import result_document
from osworld_pipeline.evaluation.scores import read_scores
from osworld_pipeline.evaluation.suite_files import EvalSuite
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.endpoints import is_address
from osworld_pipeline.runs.checkpoints.external import find_or_add
from osworld_pipeline.runs.checkpoints.registry import newest_checkpoint
from osworld_pipeline.runs.evaluate.plan import EvaluationPlan, TaskChoice, load_tasks, plan_evaluation
from osworld_pipeline.store import TrajectoryStore
from resources.deployment import deployment_tracking
from resources.state import RecipeResource


def run_evaluate(
    defs: dg.Definitions,
    *,
    source: RecipeResource,
    state_root: Path,
    checkpoint: str,
    choice: TaskChoice,
    console: Console,
    on_start: Callable[[Checkpoint, EvalSuite], None] = lambda checkpoint, suite: None,
) -> dict[str, Any]:
    """`checkpoint`: as for checkpoints.external.find_or_add; empty for the champion, or the newest if there is none.
    `on_start` is called with the evaluation after all checks. Returns the result document (evaluation/result_file.py).

    Raises:
        PipelineError: before anything starts: no such checkpoint, tasks or recipe, or as open_in_process; later: a pool
            stays full (wait_for_pools).
        JobStoppedError: the evaluation failed; finished episodes are kept.
    """
    state, recipe = StateDir(state_root.resolve()), source.load()
    suite = load_tasks(state, recipe, choice)
    chosen = find_or_add(state, checkpoint) if checkpoint else default_checkpoint(state, source)
    plan = plan_evaluation(recipe, chosen.checkpoint_id, suite=suite)
    is_whole = not choice.tasks_file and choice.max_tasks is None
    starts_warm = samples_here(recipe, chosen) and not plan.episodes.keys() <= _stored(state, plan)
    with open_in_process(defs, source=source, state_root=state_root, console=console, starts_warm=starts_warm) as here:
        on_start(chosen, suite)
        here.expect(RANK)
        if is_whole and suite.name in SUITES.get_partition_keys():
            here.evaluate([chosen.checkpoint_id], [suite.name])
        else:
            request = {"checkpoint_id": chosen.checkpoint_id, **request_of(choice)}
            here.run(EVALUATE_TASKS, request={evaluate_on_tasks.name: request})
        here.run(RANK)
    episodes = [found[0] for found in TrajectoryStore(state).read_parts(tuple(plan.episodes)).values()]
    (score,) = read_scores(state, confidence=recipe.evaluation.confidence, stage_keys=[plan.stage_key])
    return result_document(
        chosen.checkpoint_id,
        suite,
        episodes,
        score,
        max_turns=recipe.evaluation.max_turns,
        seeds=recipe.evaluation.seeds,
        settings=_settings(recipe),
    )


def default_checkpoint(state: StateDir, source: RecipeResource) -> Checkpoint:
    """The champion if there is one; else the newest checkpoint. Raises TableError if there is no checkpoint; the
    message has the command that trains one with the recipe of `source`."""
    tracking = deployment_tracking(os.environ)
    # A query to MLflow creates its database; without a database, no champion is set.
    champion = tracking.champion(state) if tracking.given_uri or state.mlflow_db.is_file() else None
    found = find_or_add(state, champion) if champion else newest_checkpoint(state)
    if found is None:
        advised = pipeline_line(state, "train", *source.options)
        raise TableError(
            f"there is no checkpoint in {state.root} yet: train one ({advised}), or name one with "
            "--checkpoint (an id, a folder, hub:OWNER/NAME or http://host/v1#model)"
        )
    return found


def samples_here(recipe: Recipe, checkpoint: Checkpoint) -> bool:
    """Whether the program that samples this checkpoint imports torch: the engine is its own, not a server."""
    return recipe.engine.kind == "transformers" and not is_address(checkpoint.path)


def _stored(state: StateDir, plan: EvaluationPlan) -> set[str]:
    """The parts of this evaluation, finished or ended in a fault."""
    return set(TrajectoryStore(state).existing_parts(prefix=plan.stage_key))


def request_of(choice: TaskChoice) -> dict[str, Any]:
    """The configuration for an op; paths are absolute, because the program may run elsewhere."""
    file = str(Path(choice.tasks_file).resolve()) if choice.tasks_file else ""
    limit = {} if choice.max_tasks is None else {"max_tasks": choice.max_tasks}
    return {"suite": choice.suite, "tasks_file": file, **limit}


def _settings(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "recipe": recipe.name,
        "temperature": recipe.evaluation.temperature,
        "dialect": recipe.agent.dialect,
        "context_mode": recipe.agent.context_mode,
        "screen": [recipe.desktop.screen_width, recipe.desktop.screen_height],
        "success_threshold": recipe.reward.success_threshold,
    }
