"""From scored groups to what one update trains on: replay joins failed groups; advantages, trajectories, records."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import AgentSection, ReplaySection
from osworld_pipeline.rollout.replay import ReplayBuffer
from osworld_pipeline.rollout.trajectories import episode_trajectory, replay_trajectory
from osworld_pipeline.training.advantage import group_advantages


@dataclass(frozen=True, kw_only=True)
class GspoBatch:
    trajectories: tuple[Trajectory, ...]
    """Those with an advantage; a group without variance gives none."""
    groups: tuple[RolloutGroup, ...]
    """With the replay row that joined them."""
    injections: tuple[Injection, ...]
    num_zero_variance: int


def build_batch(
    groups: Sequence[RolloutGroup],
    *,
    replay: ReplayBuffer,
    settings: ReplaySection,
    agent: AgentSection,
    renderer: Renderer,
    read_blob: Callable[[str], bytes],
    rng: random.Random,
) -> GspoBatch:
    """Shaped rewards decide advantages; raw task rewards alone decide whether replay joins."""
    trajectories: list[Trajectory] = []
    joined: list[RolloutGroup] = []
    injections: list[Injection] = []
    num_zero_variance = 0
    for group in groups:
        row = replay.inject(group, threshold=settings.threshold, rng=rng)
        group = replace(group, replay=row)
        advantages = group_advantages(group)
        joined.append(group if advantages.has_signal else replace(group, replay=None))
        if not advantages.has_signal:
            num_zero_variance += 1
            continue
        for episode, advantage in zip(group.valid_episodes, advantages.episodes, strict=True):
            if advantage and any(episode.response_mask):
                trajectories.append(episode_trajectory(episode, read_blob, advantage=advantage))
        if row is not None and advantages.replay is not None:
            trajectory = replay_trajectory(
                row,
                read_blob,
                renderer,
                max_tokens=agent.max_context_tokens,
                advantage=advantages.replay,
                weight=settings.weight,
            )
            trajectories.append(trajectory)
            injections.append(_injection(group, row, advantages.replay, settings.weight))
    return GspoBatch(
        trajectories=tuple(trajectories),
        groups=tuple(joined),
        injections=tuple(injections),
        num_zero_variance=num_zero_variance,
    )


def _injection(group: RolloutGroup, row: ReplayRow, advantage: float, weight: float) -> Injection:
    return Injection(
        injection_id=f"{group.group_id}-{row.row_id[:12]}",
        group_id=group.group_id,
        row_id=row.row_id,
        task_id=row.task_id,
        source_dataset=row.source_dataset,
        reward=row.reward,
        advantage=advantage,
        weight=weight,
    )
