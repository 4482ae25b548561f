"""The batch of one update, and the status of every group that was rolled out for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.rollout.replay import ReplayStats, SkippedRow


@dataclass(frozen=True, kw_only=True)
class GspoBatch:
    trajectories: tuple[Trajectory, ...] = ()
    """Sequences with an advantage, and those without one that count in the denominator of the loss
    (`gspo.denominator`)."""
    groups: tuple[RolloutGroup, ...] = ()
    """The groups with their statuses and the replay rows that joined them."""
    injections: tuple[Injection, ...] = ()
    replay: ReplayStats = field(default_factory=ReplayStats)
    skipped: tuple[SkippedRow, ...] = ()
    """Replay rows that were drawn and could not be used."""

    def num_groups(self, status: GroupStatus) -> int:
        return sum(group.status is status for group in self.groups)

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Episodes of all groups, including faults and resampled ones."""
        return tuple(episode for group in self.groups for episode in group.episodes)

    @property
    def fault_share(self) -> float:
        """Share of its episodes that ended in a fault or a timeout; 0 without episodes."""
        episodes = self.episodes
        return sum(not one.outcome.is_valid for one in episodes) / len(episodes) if episodes else 0.0


def merge_batches(batches: Sequence[GspoBatch]) -> GspoBatch:
    """Merges them into one batch, in order."""
    stats = [batch.replay for batch in batches]
    return GspoBatch(
        trajectories=tuple(one for batch in batches for one in batch.trajectories),
        groups=tuple(one for batch in batches for one in batch.groups),
        injections=tuple(one for batch in batches for one in batch.injections),
        replay=ReplayStats(
            **{count.name: sum(getattr(one, count.name) for one in stats) for count in fields(ReplayStats)}
        ),
        skipped=tuple(one for batch in batches for one in batch.skipped),
    )


def without_training(batch: GspoBatch, status: GroupStatus, reason: str) -> GspoBatch:
    """The same groups, dropped: none are trained on, and no replay rows join them."""
    groups = tuple(
        replace(
            group,
            status=status,
            reason=reason,
            replay=None,
            episodes=tuple(replace(episode, advantage=None) for episode in group.episodes),
        )
        for group in batch.groups
    )
    return replace(batch, trajectories=(), injections=(), groups=groups)


def as_held(batch: GspoBatch, reason: str, *, update: int, num_try: int) -> GspoBatch:
    """The same groups as the record of a held try of `update`. Their names get the suffix `-held-<update>-<try>`,
    because the groups that run in their place reuse the original names."""
    suffix = f"-held-{update}-{num_try}"
    dropped = without_training(batch, GroupStatus.HELD, reason)
    return replace(dropped, groups=tuple(_renamed(group, f"{group.group_id}{suffix}") for group in dropped.groups))


def _renamed(group: RolloutGroup, group_id: str) -> RolloutGroup:
    def named(episode: Episode) -> Episode:
        rest = episode.episode_id.removeprefix(group.group_id)
        return replace(episode, group_id=group_id, episode_id=f"{group_id}{rest}")

    return replace(group, group_id=group_id, episodes=tuple(named(episode) for episode in group.episodes))


def assigned_to(batch: GspoBatch, update: int) -> GspoBatch:
    """Sets the update that trains (or drops) the groups and their episodes; nothing else changes."""
    groups = tuple(
        replace(group, update=update, episodes=tuple(replace(episode, update=update) for episode in group.episodes))
        for group in batch.groups
    )
    return replace(batch, groups=groups)
