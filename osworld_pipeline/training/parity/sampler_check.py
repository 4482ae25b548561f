"""Compares the sampler's log-probabilities with the trainer's: the same weights must give the same values. An update
without a token to compare is refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError


@dataclass(kw_only=True)
class _Difference:
    total: float = 0.0
    count: int = 0
    worst_id: str = ""
    worst: float = 0.0

    def add(self, trajectory_id: str, diffs: torch.Tensor) -> None:
        if not len(diffs):
            return
        self.total, self.count = self.total + float(diffs.sum()), self.count + len(diffs)
        mean = float(diffs.mean())
        # The first NaN counts as the largest difference.
        if mean > self.worst or (math.isnan(mean) and not math.isnan(self.worst)):
            self.worst_id, self.worst = trajectory_id, mean

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


def _token_ages(trajectory: Trajectory, *, num_updates: int) -> torch.Tensor:
    """Age of each sampled token: the number of updates from the weights that sampled it to the trainer's current ones.
    Empty for replay."""
    if trajectory.sampled_logprobs is None:
        return torch.zeros(0)
    if trajectory.policy_versions is None:
        return torch.zeros(trajectory.num_response_tokens)
    mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
    return (num_updates - torch.tensor(trajectory.policy_versions)[mask]).float()


def check_sampler(
    trajectories: Sequence[Trajectory], own: Sequence[torch.Tensor], *, num_updates: int, max_diff: float
) -> dict[str, float]:
    """Mean absolute differences over the sampled tokens, for this trainer's weights (fresh tokens, canaries included)
    and for older ones; the share of fresh tokens and the ages of the tokens in updates, both without canaries; and the
    number of canary tokens.

    Raises:
        TrainingError: fresh tokens differ by more than `max_diff` on average (names the worst trajectory), or there
            are no fresh tokens.
    """
    fresh, stale, ages = _Difference(), _Difference(), [torch.zeros(0)]
    num_canary_tokens = 0
    for trajectory, own_logprobs in zip(trajectories, own, strict=True):
        if trajectory.sampled_logprobs is None:
            continue
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        diffs = (own_logprobs - torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32))[mask].abs()
        age = _token_ages(trajectory, num_updates=num_updates)
        fresh.add(trajectory.trajectory_id, diffs[age == 0])
        if trajectory.is_canary:
            num_canary_tokens += int((age == 0).sum())
            continue
        stale.add(trajectory.trajectory_id, diffs[age != 0])
        ages.append(age)
    if not fresh.count:
        raise TrainingError(
            f"update {num_updates + 1}: its own weights sampled none of its tokens, so trainer and sampler cannot "
            "be compared: add a canary, a response sampled with the weights of this update"
        )
    if not fresh.mean <= max_diff:
        raise TrainingError(
            f"update {num_updates + 1}: the trainer's log-probabilities of the sampled tokens differ from the "
            f"sampler's by {fresh.mean:.2g} on average, more than {max_diff:g} (worst: {fresh.worst_id} with "
            f"{fresh.worst:.2g}); check that both run the same weights on the same tokens and images"
        )
    staleness = torch.cat(ages)
    num_checked = fresh.count - num_canary_tokens
    return {
        "trainer_sampler_logprob_diff": fresh.mean,
        "trainer_sampler_logprob_diff_stale": stale.mean,
        "checked_token_share": num_checked / max(len(staleness), 1),
        "num_canary_tokens": float(num_canary_tokens),
        "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": float(staleness.max()) if len(staleness) else 0.0,
    }
