"""A rollout group: sibling episodes of one task, and the replay row that may join them."""

from dataclasses import dataclass
from enum import StrEnum

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.replay import ReplayRow


class GroupFate(StrEnum):
    """What became of a group's episodes in training."""

    TRAINED = "trained"
    ZERO_VARIANCE = "zero_variance"
    """All valid episodes have the same reward, raw or shaped as `rollout.signal` says, and no replay row joined."""
    TOO_FEW_VALID = "too_few_valid"
    """Faults left fewer than two episodes, after every resample."""
    STALE = "stale"
    """Sampled by weights more than `max_staleness` updates old."""
    HELD = "held"
    """Of a try of an update in which too many episodes ended in faults; it was rolled out again."""
    SUPERSEDED = "superseded"
    """Of an update that a resumed stage made again."""
    NOT_KEPT = "not_kept"
    """Of a flywheel's round: no episode reached the threshold."""


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    group_id: str
    task_id: str
    stage_key: str
    update: int
    episodes: tuple[Episode, ...]
    """All that were run for it, faults and resampled ones included."""
    replay: ReplayRow | None = None
    fate: GroupFate = GroupFate.TRAINED
    reason: str = ""
    """One sentence where the fate is not `trained`."""

    @property
    def valid_episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.outcome.is_valid)

    @property
    def oldest_policy_version(self) -> int | None:
        """Of the weights that sampled any turn of its valid episodes."""
        versions = [episode.oldest_policy_version for episode in self.valid_episodes]
        return min((version for version in versions if version is not None), default=None)
