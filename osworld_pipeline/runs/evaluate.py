"""Evaluates one checkpoint on the held-out tasks, task by task: what a killed run has finished is not run again."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.evaluation.suites import build_suite
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan, run_episode
from osworld_pipeline.rollout.run_group import require_desktops
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.rollout_session import RolloutSession, episode_settings, rollout_session
from osworld_pipeline.runs.stages import evaluation_key
from osworld_pipeline.trajectories.store import TrajectoryStore

Report = Callable[[Mapping[str, Any]], None]


def main(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """`job`: recipe, state_root, checkpoint {checkpoint_id, path}, servers, run_ids.

    Result: `{checkpoint_id, evaluation_key, num_episodes, num_reused, num_success, num_valid}`.
    """
    from osworld_pipeline.training.model import load_model

    recipe = Recipe.model_validate(job["recipe"])
    state = StateDir(Path(job["state_root"]))
    folder = state.root / job["checkpoint"]["path"]
    return asyncio.run(_evaluate(job, report, recipe, state, load_model(folder), load_processor(folder)))


async def _evaluate(
    job: dict[str, Any], report: Report, recipe: Recipe, state: StateDir, model: Any, processor: Any
) -> dict[str, Any]:
    checkpoint_id = job["checkpoint"]["checkpoint_id"]
    tasks = {item.task.task_id: item.task for item in heldout_suite(recipe).heldout}
    key = evaluation_key(recipe, suite_digest=heldout_suite(recipe).digest)
    plans = {
        plan.episode_id: (tasks[task_id], plan)
        for task_id in tasks
        for seed in recipe.evaluation.seeds
        for plan in [plan_evaluation(recipe, checkpoint_id, key, task_id, seed, job.get("run_ids", {}))]
    }
    store = TrajectoryStore(state)
    done = {part: store.read_episodes(part)[0] for part in store.existing_parts("episodes") if part in plans}
    reused = {part: episode for part, episode in done.items() if episode.outcome.is_valid}
    missing = [plans[part] for part in plans if part not in reused]
    report(_progress(len(reused), len(plans), [*reused.values()]))
    episodes = list(reused.values())
    if missing:
        servers = EnvServers.from_job(job["servers"])
        async with rollout_session(
            recipe=recipe, state=state, servers=servers, model=model, processor=processor, client_id=checkpoint_id
        ) as session:
            await _run(missing, session, recipe, episodes, len(plans), report)
    return {
        "checkpoint_id": checkpoint_id,
        "evaluation_key": key,
        "num_episodes": len(episodes),
        "num_reused": len(reused),
        "num_valid": sum(episode.outcome.is_valid for episode in episodes),
        "num_success": sum(episode.outcome is Outcome.SUCCESS for episode in episodes),
    }


async def _run(
    missing: list[tuple[Task, EpisodePlan]],
    session: RolloutSession,
    recipe: Recipe,
    episodes: list[Episode],
    total: int,
    report: Report,
) -> None:
    """Runs and stores each episode as a part of its own, as many at a time as there are replicas."""
    settings = episode_settings(recipe, max_turns=recipe.evaluation.max_turns)
    free_replicas = asyncio.Semaphore(recipe.desktop.num_replicas)
    ran: list[Episode] = []

    async def run_one(task: Task, plan: EpisodePlan) -> None:
        async with free_replicas:
            episode = await run_episode(task, plan, tools=session.tools, settings=settings)
            await asyncio.to_thread(session.store.write_episodes, plan.episode_id, [episode])
        ran.append(episode)
        episodes.append(episode)
        report(_progress(len(episodes), total, episodes))

    try:
        async with asyncio.TaskGroup() as group:
            for task, plan in missing:
                group.create_task(run_one(task, plan))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    require_desktops(ran)


def heldout_suite(recipe: Recipe) -> Any:
    suite = recipe.suite
    return build_suite(
        seed=suite.seed,
        families=suite.families,
        num_train=suite.num_train,
        num_heldout=suite.num_heldout,
        screen=(recipe.desktop.screen_width, recipe.desktop.screen_height),
    )


def plan_evaluation(
    recipe: Recipe, checkpoint_id: str, key: str, task_id: str, seed: int, run_ids: Mapping[str, str]
) -> EpisodePlan:
    """The one episode of (checkpoint, task, seed) under these settings; its part bears its name."""
    return EpisodePlan(
        episode_id=f"eval-{checkpoint_id}-{key}-{task_id}-s{seed}",
        purpose=EpisodePurpose.EVALUATE,
        checkpoint_id=checkpoint_id,
        sampling=SamplingParams(
            temperature=recipe.evaluation.temperature, max_new_tokens=recipe.agent.max_response_tokens, seed=seed
        ),
        seed=seed,
        stage_key=f"eval-{checkpoint_id}-{key}",
        run_ids=dict(run_ids),
    )


def _progress(done: int, total: int, episodes: list[Episode]) -> dict[str, Any]:
    successes = sum(episode.is_success for episode in episodes)
    return {"kind": "progress", "done": done, "total": total, "note": f"{successes} successes"}
