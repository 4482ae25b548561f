"""Evaluates checkpoints on the held-out tasks, task by task: what a killed run has finished is not run again."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, run_episode
from osworld_pipeline.rollout.run_group import require_desktops
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.evaluation_plan import plan_evaluation
from osworld_pipeline.runs.rollout_session import RolloutSession, episode_settings, rollout_session

Report = Callable[[Mapping[str, Any]], None]


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """`job`: recipe, state_root, servers, checkpoints [{checkpoint_id, stage, path, run_ids}]."""
    recipe = Recipe.model_validate(job["recipe"])
    state = StateDir(Path(job["state_root"]))
    servers = EnvServers.from_job(job["servers"])
    return asyncio.run(_evaluate_all(job["checkpoints"], report, recipe, state, servers))


async def _evaluate_all(
    checkpoints: Sequence[Mapping[str, Any]], report: Report, recipe: Recipe, state: StateDir, servers: EnvServers
) -> dict[str, Any]:
    """One after the other; the figures of each by checkpoint id."""
    return {entry["checkpoint_id"]: await _evaluate(entry, report, recipe, state, servers) for entry in checkpoints}


async def _evaluate(
    entry: Mapping[str, Any], report: Report, recipe: Recipe, state: StateDir, servers: EnvServers
) -> dict[str, Any]:
    from osworld_pipeline.training.model import load_policy

    folder = state.root / entry["path"]
    plan = plan_evaluation(recipe, entry["checkpoint_id"], entry["run_ids"])
    finished = plan.finished(state)
    missing = [planned for part, planned in plan.episodes.items() if part not in finished]
    episodes = list(finished.values())

    def tell() -> None:
        note = f"{sum(episode.is_success for episode in episodes)} successes"
        done = {"done": len(episodes), "total": len(plan.episodes), "note": note}
        report({"kind": "progress", "stage": f"evaluate {entry['stage']}", **done})

    tell()
    if missing:
        async with rollout_session(
            recipe=recipe,
            state=state,
            servers=servers,
            model=load_policy(folder, recipe.model, is_frozen=True),
            processor=load_processor(folder),
            client_id=entry["checkpoint_id"],
        ) as session:
            await _run(missing, session, recipe, episodes, tell)
    return {
        "num_episodes": len(episodes),
        "num_reused": len(finished),
        "num_valid": sum(episode.outcome.is_valid for episode in episodes),
        "num_success": sum(episode.is_success for episode in episodes),
    }


async def _run(
    missing: Sequence[tuple[Task, EpisodePlan]],
    session: RolloutSession,
    recipe: Recipe,
    episodes: list[Episode],
    tell: Callable[[], None],
) -> None:
    """Runs and stores the episodes, as many at a time as there are replicas; adds them to `episodes`."""
    settings = episode_settings(recipe, max_turns=recipe.evaluation.max_turns)
    free_replicas = asyncio.Semaphore(recipe.desktop.num_replicas)
    ran: list[Episode] = []

    async def run_one(task: Task, plan: EpisodePlan) -> None:
        async with free_replicas:
            episode = await run_episode(task, plan, tools=session.tools, settings=settings)
            await asyncio.to_thread(session.store.write_episodes, plan.episode_id, [episode])
        ran.append(episode)
        episodes.append(episode)
        tell()

    try:
        async with asyncio.TaskGroup() as group:
            for task, plan in missing:
                group.create_task(run_one(task, plan))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    require_desktops(ran)
