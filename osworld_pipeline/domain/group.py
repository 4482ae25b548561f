"""A rollout group: sibling episodes of one task, and the replay row that may join them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.stored import Stored


class GroupStatus(StrEnum):
    """How training used a group's episodes."""

    TRAINED = "trained"
    ZERO_VARIANCE = "zero_variance"
    """All valid episodes have the same shaped reward or, with `rollout.signal = "task"`, the same raw one, and no
    replay row changes that."""
    TOO_FEW_VALID = "too_few_valid"
    """Fewer valid episodes than `rollout.min_valid_episodes` after all resamples."""
    STALE = "stale"
    """Sampled by weights more than `max_staleness` updates old."""
    HELD = "held"
    """Discarded when its update was held, because too many of the update's episodes ended in faults."""
    SUPERSEDED = "superseded"
    """A group of an update that a resumed stage made again."""
    NOT_KEPT = "not_kept"
    """No episode reached the threshold, in a round of the flywheel."""


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    group_id: Annotated[str, Stored("Sibling episodes of one task in one update.")]
    task_id: Annotated[str, Stored("Their task.")]
    domain: Annotated[str, Stored("Domain of the task; with task_id its identity; NULL before version 10.")] = ""
    stage_key: Annotated[str, Stored("The checkpoint being trained.")]
    update: Annotated[int, Stored("The update that they train, from 1.", bits=32)]
    """The number starts at 0 in memory and in the files."""
    episodes: tuple[Episode, ...]
    """All episodes run for it, including faults and resampled ones."""
    replay: ReplayRow | None = None
    status: Annotated[
        GroupStatus,
        Stored(
            "Status: trained, zero_variance, too_few_valid, stale, held, not_kept or superseded; NULL in groups older "
            "than this column.",
            name="fate",
        ),
    ] = GroupStatus.TRAINED
    reason: Annotated[str, Stored("Why it was not trained on, in one sentence.")] = ""

    @property
    def valid_episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.outcome.is_valid)

    @property
    def oldest_policy_version(self) -> int | None:
        """The oldest version of the weights that sampled turns of its valid episodes."""
        versions = [episode.oldest_policy_version for episode in self.valid_episodes]
        return min((version for version in versions if version is not None), default=None)
