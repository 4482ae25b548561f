"""What one update trains on, and what became of every group that was rolled out for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

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
    groups = tuple(replace(group, fate=fate, reason=reason, replay=None) for group in batch.groups)
    return replace(batch, trajectories=(), injections=(), groups=groups)


def assigned_to(batch: GspoBatch, update: int) -> GspoBatch:
    """Its groups and their episodes as of the update that trains (or drops) them; nothing else changes."""
    groups = tuple(
        replace(group, update=update, episodes=tuple(replace(episode, update=update) for episode in group.episodes))
        for group in batch.groups
    )
    return replace(batch, groups=groups)
