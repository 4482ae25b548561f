"""Groups of sibling episodes, run concurrently on the available replicas."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, SamplingParams
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EngineError, EnvServerError
from osworld_pipeline.rollout.attempt import derive_seed
from osworld_pipeline.rollout.run_episode import (
    EpisodePlan,
    RunEpisode,
)

OnEpisode = Callable[[Episode], None]
"""Called with each episode as it ends; its exceptions end the run."""


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Settings shared by the groups of one update."""

    stage_key: str
    update: int
    group_size: int
    checkpoint_id: str
    """The checkpoint that is sampled; in training the one that is being trained."""
    sampling: SamplingParams
    """Its seed is the base from which each episode's seed is derived."""
    purpose: EpisodePurpose = EpisodePurpose.TRAIN
    run_ids: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    """Stage of the checkpoint."""
    parent_id: str = ""
    """The same as in EpisodePlan."""
    min_valid: int = 2
    """The faulty episodes of a group with fewer valid ones are run again."""
    max_resamples: int = 0
    """Maximum number of repetitions."""


def group_id_of(stage_key: str, update: int, group_index: int) -> str:
    return f"{stage_key}-u{update:04d}-g{group_index:02d}"


def plan_episode(plan: GroupPlan, group_id: str, sample_index: int, *, resample: int = 0) -> EpisodePlan:
    """Ids and seed depend only on the plan and the group's name, so that a rerun samples the same episodes.

    `resample`: how many times this member has been run before, always with a fault.
    """
    episode_id = f"{group_id}-s{sample_index:02d}" + (f"-r{resample}" if resample else "")
    seed = derive_seed(plan.sampling.seed, episode_id)
    return EpisodePlan(
        episode_id=episode_id,
        purpose=plan.purpose,
        checkpoint_id=plan.checkpoint_id,
        sampling=replace(plan.sampling, seed=seed),
        group_id=group_id,
        seed=seed,
        stage_key=plan.stage_key,
        update=plan.update,
        run_ids=plan.run_ids,
        stage=plan.stage,
        parent_id=plan.parent_id,
    )


async def run_group(task: Task, plan: GroupPlan, group_id: str, *, run_one: RunEpisode) -> RolloutGroup:
    """Runs `plan.group_size` episodes of the task concurrently. If faults leave fewer than `plan.min_valid`, the faulty
    members are run again, at most `plan.max_resamples` times. All episodes stay in the group in planned order;
    `valid_episodes` omits the faulty ones.

    Raises:
        RecipeError, StoreError, TokenEndedError: as run_episode; the other episodes are cancelled and release their
            desktops.
    """
    episodes: list[Episode] = []
    missing = list(range(plan.group_size))
    for resample in range(plan.max_resamples + 1):
        planned = [(task, plan_episode(plan, group_id, sample, resample=resample)) for sample in missing]
        ended = await gather_episodes(planned, run_one)
        episodes += ended
        num_valid = sum(episode.outcome.is_valid for episode in episodes)
        if num_valid >= plan.min_valid:
            break
        missing = [sample for sample, episode in zip(missing, ended, strict=True) if not episode.outcome.is_valid]
    return RolloutGroup(
        group_id=group_id,
        task_id=task.task_id,
        domain=task.domain,
        stage_key=plan.stage_key,
        update=plan.update,
        episodes=tuple(episodes),
    )


async def gather_groups(
    planned: Sequence[tuple[Task, GroupPlan, str]], run_one: RunEpisode
) -> tuple[RolloutGroup, ...]:
    """Runs groups concurrently and returns them in planned order. Raises as run_group."""
    try:
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(run_group(*group, run_one=run_one)) for group in planned]
    except BaseExceptionGroup as failures:
        # One error ended the run; the others are consequences.
        raise failures.exceptions[0] from failures
    return tuple(job.result() for job in jobs)


async def gather_episodes(planned: Sequence[tuple[Task, EpisodePlan]], run_one: RunEpisode) -> tuple[Episode, ...]:
    """Runs episodes concurrently and returns them in planned order; the first error cancels the others and is
    raised."""
    try:
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(_as_coroutine(run_one, *one)) for one in planned]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return tuple(job.result() for job in jobs)


def in_turn(run_one: RunEpisode, num_slots: int, *, on_episode: OnEpisode | None = None) -> RunEpisode:
    """Runs at most `num_slots` episodes at a time, first come first served, across all callers of the returned
    function."""
    slots = asyncio.Semaphore(num_slots)

    async def run(task: Task, plan: EpisodePlan) -> Episode:
        async with slots:
            episode = await run_one(task, plan)
        if on_episode is not None:
            on_episode(episode)
        return episode

    return run


def require_services(episodes: Sequence[Episode]) -> None:
    """Checks that at least one episode had a working desktop and policy.

    Raises:
        EnvServerError, EngineError: every episode ended in a fault of the environment or of the policy engine; names
            the more frequent kind and its first error.
    """
    if not episodes or not all(one.outcome in (Outcome.ENV_FAULT, Outcome.POLICY_FAULT) for one in episodes):
        return
    env_faults = [one for one in episodes if one.outcome is Outcome.ENV_FAULT]
    policy_faults = [one for one in episodes if one.outcome is Outcome.POLICY_FAULT]
    faults, error = (
        (env_faults, EnvServerError) if len(env_faults) >= len(policy_faults) else (policy_faults, EngineError)
    )
    count = f"all {len(episodes)}" if len(faults) == len(episodes) else f"{len(faults)} of {len(episodes)}"
    others = "" if len(faults) == len(episodes) else ", the others in the other kind of fault"
    article = "an" if error is EnvServerError else "a"
    raise error(f"{count} episodes ended in {article} {faults[0].outcome}{others}; the first: {faults[0].error}")


async def _as_coroutine(run_one: RunEpisode, task: Task, plan: EpisodePlan) -> Episode:
    return await run_one(task, plan)
