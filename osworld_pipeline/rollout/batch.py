"""What one update trains on, and what became of every group that was rolled out for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import GroupFate, RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.rollout.replay import ReplayStats, SkippedRow


@dataclass(frozen=True, kw_only=True)
class GspoBatch:
    trajectories: tuple[Trajectory, ...] = ()
    """What the update trains on and what its loss counts in its mean (`gspo.denominator`)."""
    groups: tuple[RolloutGroup, ...] = ()
    """With their fates, and the replay rows that joined them."""
    injections: tuple[Injection, ...] = ()
    replay: ReplayStats = field(default_factory=ReplayStats)
    skipped: tuple[SkippedRow, ...] = ()
    """Replay rows that were drawn and could not be used."""

    def num_groups(self, fate: GroupFate) -> int:
        return sum(group.fate is fate for group in self.groups)

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Of all groups, faults and resampled ones included."""
        return tuple(episode for group in self.groups for episode in group.episodes)

    @property
    def fault_share(self) -> float:
        """Of its episodes, those that ended in a fault or a timeout; 0 without an episode."""
        episodes = self.episodes
        return sum(not one.outcome.is_valid for one in episodes) / len(episodes) if episodes else 0.0


def merge_batches(batches: Sequence[GspoBatch]) -> GspoBatch:
    """One batch of them all, in this order."""
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


def without_training(batch: GspoBatch, fate: GroupFate, reason: str) -> GspoBatch:
    """The same groups, dropped: nothing of them is trained on and no replay row joined them."""
    groups = tuple(
        replace(
            group,
            fate=fate,
            reason=reason,
            replay=None,
            episodes=tuple(replace(episode, advantage=None) for episode in group.episodes),
        )
        for group in batch.groups
    )
    return replace(batch, trajectories=(), injections=(), groups=groups)


def as_held(batch: GspoBatch, reason: str, *, update: int, num_try: int) -> GspoBatch:
    """The same groups as the record of a held try of `update`, under names that end in `-held-<update>-<try>`: the
    names that they had are for the groups that run in their place."""
    suffix = f"-held-{update}-{num_try}"
    dropped = without_training(batch, GroupFate.HELD, reason)
    return replace(dropped, groups=tuple(_renamed(group, f"{group.group_id}{suffix}") for group in dropped.groups))


def _renamed(group: RolloutGroup, group_id: str) -> RolloutGroup:
    def named(episode: Episode) -> Episode:
        rest = episode.episode_id.removeprefix(group.group_id)
        return replace(episode, group_id=group_id, episode_id=f"{group_id}{rest}")

    return replace(group, group_id=group_id, episodes=tuple(named(episode) for episode in group.episodes))


def assigned_to(batch: GspoBatch, update: int) -> GspoBatch:
    """Its groups and their episodes as of the update that trains (or drops) them; nothing else changes."""
    groups = tuple(
        replace(group, update=update, episodes=tuple(replace(episode, update=update) for episode in group.episodes))
        for group in batch.groups
    )
    return replace(batch, groups=groups)
