"""Group-relative advantages: the difference of an episode's reward from those of its siblings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from osworld_pipeline.domain.episode import Reward
from osworld_pipeline.domain.group import RolloutGroup

Estimator = Literal["mean_std", "mean", "leave_one_out"]
SignalRule = Literal["task", "shaped"]
"""The rewards of a group that must differ for it to be trained on: the raw task rewards or the shaped ones."""
STD_FLOOR = 1e-6
"""Rewards with a smaller deviation are equal up to rounding: their difference is noise, which no estimator turns into a
signal."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    episodes: tuple[float, ...]
    """Aligned with the group's valid_episodes."""
    replay: float | None
    """None if no replay row joined."""

    @property
    def is_zero(self) -> bool:
        return not any(self.episodes) and not self.replay


def compute_advantages(rewards: Sequence[float], estimator: Estimator = "mean_std") -> tuple[float, ...]:
    """The advantage of each reward, by estimator:

        mean_std       A_i = (r_i - mean) / (std + 1e-6), std with n - 1 in its denominator
                       (GRPO, arXiv 2402.03300)
        mean           A_i = r_i - mean (Dr. GRPO, arXiv 2503.20783): hard and easy tasks, whose rewards hardly vary,
                       are not amplified
        leave_one_out  A_i = r_i - mean of the others = n / (n - 1) (r_i - mean) (RLOO, arXiv 2402.14740): a baseline
                       that does not depend on the sample, which makes it unbiased

    All zeros for a group of one, or if std is below 1e-6: a group with equal rewards has no signal.

    Raises:
        ValueError: a reward is not finite.
    """
    count = len(rewards)
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite, these are {list(rewards)}")
    if count < 2:
        return (0.0,) * count
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    if std < STD_FLOOR:
        return (0.0,) * count
    scale = {"mean_std": 1 / (std + STD_FLOOR), "mean": 1.0, "leave_one_out": count / (count - 1)}[estimator]
    return tuple((reward - mean) * scale for reward in rewards)


def group_advantages(group: RolloutGroup, estimator: Estimator = "mean_std") -> GroupAdvantages:
    """Advantages over the shaped rewards of the valid episodes; a replay row joins as one more sample with its stored
    reward. Faults and timeouts are excluded.

    Raises:
        ValueError: a valid episode has no reward, or a reward is not finite.
    """
    rewards = [reward.shaped for reward in _valid_rewards(group)]
    if group.replay is None:
        return GroupAdvantages(episodes=compute_advantages(rewards, estimator), replay=None)
    *own, replay = compute_advantages([*rewards, group.replay.reward], estimator)
    return GroupAdvantages(episodes=tuple(own), replay=replay)


def no_signal_reason(group: RolloutGroup, advantages: GroupAdvantages, rule: SignalRule) -> str:
    """Why the group has no training signal, as a clause that names the rule; empty if it has one. `advantages`: those
    of the group. A replay row that joined is one more sample, whose stored reward is a raw one.

    Raises:
        ValueError: as group_advantages.
    """
    raw = [reward.task for reward in _valid_rewards(group)]
    count = f"all {len(raw)} valid episodes"
    if rule == "task" and not _differ([*raw, *([group.replay.reward] if group.replay else [])]):
        same = f'have the raw task reward {raw[0]:g} (rollout.signal = "task")'
    elif advantages.is_zero:
        same = f'have the same shaped reward (rollout.signal = "{rule}")'
    else:
        return ""
    return f"{count} {same}, and no replay row changes that"


def _differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return any(compute_advantages(rewards, "mean"))


def _valid_rewards(group: RolloutGroup) -> list[Reward]:
    rewards: list[Reward] = []
    for episode in group.valid_episodes:
        if episode.reward is None:
            raise ValueError(f"episode {episode.episode_id} ended in {episode.outcome} and has no reward")
        rewards.append(episode.reward)
    return rewards
