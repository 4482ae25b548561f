"""Group-relative advantages: how much better an episode did than its siblings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.group import RolloutGroup

STD_FLOOR = 1e-6
"""Below this the rewards are equal up to rounding, and dividing by it would make noise into a signal."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    episodes: tuple[float, ...]
    """Aligned with the group's valid_episodes."""
    replay: float | None
    """None where no replay row joined."""

    @property
    def has_signal(self) -> bool:
        return any(self.episodes) or bool(self.replay)


def compute_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + 1e-6), std with n - 1 in its denominator.

    All zeros for a group of one, or where std is under 1e-6: a group whose members did equally well teaches nothing.
    """
    count = len(rewards)
    if count < 2:
        return (0.0,) * count
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    if std < STD_FLOOR:
        return (0.0,) * count
    return tuple((reward - mean) / (std + STD_FLOOR) for reward in rewards)


def group_advantages(group: RolloutGroup) -> GroupAdvantages:
    """Advantages over the shaped rewards of the valid episodes; a replay row joins as one more sample with its stored
    reward. Faults and timeouts are no samples.

    Raises:
        ValueError: a valid episode without a reward.
    """
    rewards: list[float] = []
    for episode in group.valid_episodes:
        if episode.reward is None:
            raise ValueError(f"episode {episode.episode_id} ended in {episode.outcome} and has no reward")
        rewards.append(episode.reward.shaped)
    if group.replay is None:
        return GroupAdvantages(episodes=compute_advantages(rewards), replay=None)
    *own, replay = compute_advantages([*rewards, group.replay.reward])
    return GroupAdvantages(episodes=tuple(own), replay=replay)
