"""Groups of real episodes, as a training update runs them."""

from collections.abc import Sequence

from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.task import Task
from osworld_pipeline.rollout.run_episode import EpisodeSettings, EpisodeTools, episode_runner
from osworld_pipeline.rollout.run_group import GroupPlan, OnEpisode, gather_groups, group_id_of, in_turn


async def run_groups(
    tasks: Sequence[Task],
    plan: GroupPlan,
    *,
    tools: EpisodeTools,
    settings: EpisodeSettings,
    on_episode: OnEpisode | None = None,
) -> tuple[RolloutGroup, ...]:
    """A group for each task, in task order, with at most one episode per replica at a time."""
    run_one = in_turn(episode_runner(tools, settings), settings.desktop.num_replicas, on_episode=on_episode)
    named = [(task, group_id_of(plan.stage_key, plan.update, index)) for index, task in enumerate(tasks)]
    return await gather_groups([(task, plan, group_id) for task, group_id in named], run_one)
