"""Groups of sibling episodes, run side by side on as many replicas as there are."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.attempt import derive_seed
from osworld_pipeline.rollout.run_episode import EpisodePlan, EpisodeSettings, EpisodeTools, run_episode


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """What the groups of one update (or of one evaluation) have in common."""

    stage_key: str
    update: int
    group_size: int
    checkpoint_id: str
    sampling: SamplingParams
    """Its seed is the base from which every episode's own is derived."""
    purpose: EpisodePurpose = EpisodePurpose.TRAIN
    run_ids: Mapping[str, str] = field(default_factory=dict)


def group_id_of(stage_key: str, update: int, group_index: int) -> str:
    return f"{stage_key}-u{update:04d}-g{group_index:02d}"


def episode_id_of(stage_key: str, update: int, group_index: int, sample_index: int) -> str:
    return f"{group_id_of(stage_key, update, group_index)}-s{sample_index:02d}"


def plan_episode(plan: GroupPlan, group_index: int, sample_index: int) -> EpisodePlan:
    """Ids and seed depend on the plan alone, so that a rerun samples the same episodes."""
    episode_id = episode_id_of(plan.stage_key, plan.update, group_index, sample_index)
    seed = derive_seed(plan.sampling.seed, episode_id)
    return EpisodePlan(
        episode_id=episode_id,
        purpose=plan.purpose,
        checkpoint_id=plan.checkpoint_id,
        sampling=replace(plan.sampling, seed=seed),
        group_id=group_id_of(plan.stage_key, plan.update, group_index),
        seed=seed,
        stage_key=plan.stage_key,
        update=plan.update,
        run_ids=plan.run_ids,
    )


async def run_groups(
    tasks: Sequence[Task],
    plan: GroupPlan,
    *,
    tools: EpisodeTools,
    settings: EpisodeSettings,
    on_episode: Callable[[Episode], None] | None = None,
) -> tuple[RolloutGroup, ...]:
    """A group of `plan.group_size` episodes for each task, in the order of the tasks. Faulty episodes stay in their
    group, where `valid_episodes` leaves them out.

    Raises:
        RecipeError, StoreError: as run_episode; the other episodes are cancelled and give their desktops back.
    """
    planned = [
        (task, plan_episode(plan, group_index, sample_index))
        for group_index, task in enumerate(tasks)
        for sample_index in range(plan.group_size)
    ]
    episodes = await run_episodes(planned, tools=tools, settings=settings, on_episode=on_episode)
    return tuple(
        RolloutGroup(
            group_id=group_id_of(plan.stage_key, plan.update, group_index),
            task_id=task.task_id,
            stage_key=plan.stage_key,
            update=plan.update,
            episodes=episodes[group_index * plan.group_size : (group_index + 1) * plan.group_size],
        )
        for group_index, task in enumerate(tasks)
    )


async def run_episodes(
    planned: Sequence[tuple[Task, EpisodePlan]],
    *,
    tools: EpisodeTools,
    settings: EpisodeSettings,
    on_episode: Callable[[Episode], None] | None = None,
) -> tuple[Episode, ...]:
    """Episodes in the order planned, at most one for each replica at a time; `on_episode` hears of each as it ends."""
    free_replicas = asyncio.Semaphore(settings.desktop.num_replicas)

    async def run_one(task: Task, plan: EpisodePlan) -> Episode:
        async with free_replicas:
            episode = await run_episode(task, plan, tools=tools, settings=settings)
        if on_episode is not None:
            on_episode(episode)
        return episode

    try:
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(run_one(task, plan)) for task, plan in planned]
    except BaseExceptionGroup as group:
        # One cause ended the run; the others are its echo.
        raise group.exceptions[0] from group
    return tuple(job.result() for job in jobs)


def require_desktops(episodes: Sequence[Episode]) -> None:
    """For a caller that cannot go on without a single episode.

    Raises:
        EnvServerError: every episode ended in an env_fault; says how the first one did.
    """
    if episodes and all(episode.outcome is Outcome.ENV_FAULT for episode in episodes):
        raise EnvServerError(f"all {len(episodes)} episodes ended in an env_fault; the first: {episodes[0].error}")
