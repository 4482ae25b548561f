"""Collects rollouts from the command line, a number of episodes of each task, with the job `collect_rollouts`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from jobs.on_request import COLLECT_ROLLOUTS, collect_on_tasks
from osworld_pipeline.cli.in_process.evaluate import default_checkpoint, request_of, samples_here
from osworld_pipeline.cli.in_process.session import open_in_process
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suite_files import EvalSuite
from osworld_pipeline.runs.checkpoints.external import find_or_add
from osworld_pipeline.runs.collect.plan import ORACLE, holds_back, load_collected, plan_collection, require_oracles
from osworld_pipeline.runs.evaluate.plan import TaskChoice
from resources.state import RecipeResource


@dataclass(frozen=True, kw_only=True)
class Collected:
    checkpoint_id: str
    stage_key: str
    """Key of the episodes, for `osworld-pipeline query`."""
    num_tasks: int
    num_episodes: int
    num_valid: int
    num_success: int
    num_faults: int
    outcomes: dict[str, int]
    num_solved_tasks: int
    num_heldout_tasks: int
    """Number of these tasks that the recipe holds out."""


def run_collect(
    defs: dg.Definitions,
    *,
    source: RecipeResource,
    state_root: Path,
    checkpoint: str,
    choice: TaskChoice,
    num_samples: int,
    temperature: float,
    console: Console,
    on_start: Callable[[str, EvalSuite], None] = lambda checkpoint_id, suite: None,
) -> Collected:
    """`checkpoint`: as in run_evaluate, or `oracle`. `on_start` is called with the rollouts after all checks.

    Raises:
        PipelineError: before anything starts: no such checkpoint, tasks or recipe, no oracle for a task, or as
            open_in_process; later: a pool stays full (wait_for_pools).
        JobStoppedError: the collection failed; finished episodes are kept.
    """
    state, recipe = StateDir(state_root.resolve()), source.load()
    suite = load_collected(state, recipe, choice)
    if checkpoint == ORACLE:
        require_oracles(recipe, suite.tasks)
        checkpoint_id, starts_warm = ORACLE, False
    else:
        chosen = find_or_add(state, checkpoint) if checkpoint else default_checkpoint(state, source)
        checkpoint_id, starts_warm = chosen.checkpoint_id, samples_here(recipe, chosen)
    request: dict[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "num_samples": num_samples,
        "temperature": temperature,
        **request_of(choice),
    }
    with open_in_process(defs, source=source, state_root=state_root, console=console, starts_warm=starts_warm) as here:
        on_start(checkpoint_id, suite)
        here.run(COLLECT_ROLLOUTS, request={collect_on_tasks.name: request})
    plan = plan_collection(recipe, checkpoint_id, suite, num_samples=num_samples, temperature=temperature)
    episodes = plan.episodes(state)
    outcomes = Counter(str(episode.outcome) for episode in episodes)
    return Collected(
        checkpoint_id=checkpoint_id,
        stage_key=plan.stage_key,
        num_tasks=len(suite.tasks),
        num_episodes=len(episodes),
        num_valid=sum(episode.outcome.is_valid for episode in episodes),
        num_success=sum(episode.is_success for episode in episodes),
        num_faults=sum(not episode.outcome.is_valid for episode in episodes),
        outcomes=dict(sorted(outcomes.items())),
        num_solved_tasks=len({episode.task_id for episode in episodes if episode.is_success}),
        num_heldout_tasks=holds_back(recipe, suite),
    )
