"""Evaluates one checkpoint on the held-out tasks, task by task: what a killed run has finished is not run again."""

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
    """`job`: recipe, state_root, checkpoint {checkpoint_id, path}, servers, run_ids."""
    recipe = Recipe.model_validate(job["recipe"])
    state = StateDir(Path(job["state_root"]))
    return asyncio.run(_evaluate(job, report, recipe, state))


async def _evaluate(job: dict[str, Any], report: Report, recipe: Recipe, state: StateDir) -> dict[str, Any]:
    from osworld_pipeline.training.model import load_model

    checkpoint_id = job["checkpoint"]["checkpoint_id"]
    folder = state.root / job["checkpoint"]["path"]
    plan = plan_evaluation(recipe, checkpoint_id, job.get("run_ids"))
    finished = plan.finished(state)
    missing = [planned for part, planned in plan.episodes.items() if part not in finished]
    episodes = list(finished.values())
    report(_progress(episodes, len(plan.episodes)))
    if missing:
        async with rollout_session(
            recipe=recipe,
            state=state,
            servers=EnvServers.from_job(job["servers"]),
            model=load_model(folder, is_frozen=True),
            processor=load_processor(folder),
            client_id=checkpoint_id,
        ) as session:
            await _run(missing, session, recipe, episodes, len(plan.episodes), report)
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
    total: int,
    report: Report,
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
        report(_progress(episodes, total))

    try:
        async with asyncio.TaskGroup() as group:
            for task, plan in missing:
                group.create_task(run_one(task, plan))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    require_desktops(ran)


def _progress(episodes: Sequence[Episode], total: int) -> dict[str, Any]:
    note = f"{sum(episode.is_success for episode in episodes)} successes"
    return {"kind": "progress", "done": len(episodes), "total": total, "note": note}
