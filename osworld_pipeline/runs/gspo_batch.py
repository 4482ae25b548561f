"""From scored groups to what one update trains on: replay joins failed groups; advantages, trajectories, records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import AgentSection, ReplaySection
from osworld_pipeline.rollout.replay import ReplayBuffer, ReplayStats, ServedGroup, SkippedRow
from osworld_pipeline.rollout.trajectories import episode_trajectory, online_replay_trajectory, replay_trajectory
from osworld_pipeline.training.advantage import group_advantages


@dataclass(frozen=True, kw_only=True)
class GspoBatch:
    trajectories: tuple[Trajectory, ...]
    """Those with an advantage; a group without variance gives none."""
    groups: tuple[RolloutGroup, ...]
    """With the replay row that joined them."""
    injections: tuple[Injection, ...]
    num_zero_variance: int
    replay: ReplayStats
    skipped: tuple[SkippedRow, ...]
    """Replay rows that were drawn and could not be used."""


@dataclass(frozen=True, kw_only=True)
class RowRenderer:
    """A replay row as a trajectory for the group it joins; its advantage is not known yet."""

    agent: AgentSection
    renderer: Renderer
    read_blob: Callable[[str], bytes]
    find_episode: Callable[[str], Episode]

    def __call__(self, group: RolloutGroup, row: ReplayRow) -> Trajectory:
        """
        Raises:
            ValueError: the row cannot be trained on here; says why.
            StoreError: its episode or one of its images is missing.
        """
        max_tokens = self.agent.max_context_tokens
        if not row.is_online:
            return replay_trajectory(
                row,
                self.read_blob,
                self.renderer,
                max_tokens=max_tokens,
                max_pixels=self.agent.max_pixels,
                dialect=self.agent.dialect,
            )
        episode = self.find_episode(row.row_id)
        if any(other.task_digest != episode.task_digest for other in group.episodes):
            raise ValueError(f"episode {row.row_id} solved task {row.task_id} as it was before its config changed")
        return online_replay_trajectory(
            row, episode, self.read_blob, max_tokens=max_tokens, processor_digest=self.renderer.processor_digest
        )


def build_batch(
    groups: Sequence[RolloutGroup],
    *,
    update: int,
    replay: ReplayBuffer,
    settings: ReplaySection,
    render_row: Callable[[RolloutGroup, ReplayRow], Trajectory],
    read_blob: Callable[[str], bytes],
) -> GspoBatch:
    """Shaped rewards decide advantages; raw task rewards alone decide whether replay joins."""
    served = replay.serve(groups, update=update, render=render_row)
    trajectories: list[Trajectory] = []
    joined: list[RolloutGroup] = []
    injections: list[Injection] = []
    num_zero_variance = 0
    for group in groups:
        one = served.groups.get(group.group_id)
        group = replace(group, replay=one.row if one else None)
        advantages = group_advantages(group)
        joined.append(group if advantages.has_signal else replace(group, replay=None))
        if not advantages.has_signal:
            num_zero_variance += 1
            continue
        for episode, advantage in zip(group.valid_episodes, advantages.episodes, strict=True):
            if advantage and any(episode.response_mask):
                trajectories.append(episode_trajectory(episode, read_blob, advantage=advantage))
        if one is not None and advantages.replay is not None:
            trajectories.append(replace(one.trajectory, advantage=advantages.replay, weight=settings.weight))
            injections.append(_injection(group, one, advantages.replay, settings))
    return GspoBatch(
        trajectories=tuple(trajectories),
        groups=tuple(joined),
        injections=tuple(injections),
        num_zero_variance=num_zero_variance,
        replay=served.stats,
        skipped=served.skipped,
    )


def _injection(group: RolloutGroup, served: ServedGroup, advantage: float, settings: ReplaySection) -> Injection:
    row = served.row
    return Injection(
        injection_id=f"{group.group_id}-{row.row_id if row.is_online else row.row_id[:12]}",
        group_id=group.group_id,
        row_id=row.row_id,
        task_id=row.task_id,
        source_dataset=row.source_dataset,
        reward=row.reward,
        advantage=advantage,
        weight=settings.weight,
        kind=row.kind,
        strategy=settings.strategy,
        verified_reward=row.verified_reward,
    )
