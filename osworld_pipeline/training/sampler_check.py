"""What the sampler said of its tokens against what the trainer says: the same weights must say the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory with the log-probabilities that the loss compares with, aligned with its token_ids."""

    trajectory: Trajectory
    own_logprobs: torch.Tensor
    """The trainer's before the update."""
    sampled_logprobs: torch.Tensor
    """The sampler's own, of whichever weights; for replay, which has none, the trainer's."""
    ref_logprobs: torch.Tensor | None

    @classmethod
    def of(
        cls, trajectory: Trajectory, own_logprobs: torch.Tensor, ref_logprobs: torch.Tensor | None
    ) -> "ScoredTrajectory":
        sampled = own_logprobs
        if trajectory.sampled_logprobs is not None:
            sampled = torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32)
        return cls(
            trajectory=trajectory, own_logprobs=own_logprobs, sampled_logprobs=sampled, ref_logprobs=ref_logprobs
        )


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
        # The first difference that is not a number is the worst of all.
        if mean > self.worst or (math.isnan(mean) and not math.isnan(self.worst)):
            self.worst_id, self.worst = trajectory_id, mean

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


def check_sampler(
    trajectories: Sequence[Trajectory], own: Sequence[torch.Tensor], *, num_updates: int, max_diff: float
) -> dict[str, float]:
    """Mean absolute differences over the sampled tokens, of this trainer's weights (`fresh`) and of older ones, and how
    many updates old the tokens are.

    Raises:
        TrainingError: on fresh tokens they differ by more than `max_diff` on average; names the worst trajectory.
    """
    fresh, stale, ages = _Difference(), _Difference(), [torch.zeros(0)]
    for trajectory, own_logprobs in zip(trajectories, own, strict=True):
        if trajectory.sampled_logprobs is None:
            continue
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        diffs = (own_logprobs - torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32))[mask].abs()
        versions = trajectory.policy_versions
        age = torch.zeros(len(diffs)) if versions is None else num_updates - torch.tensor(versions)[mask]
        fresh.add(trajectory.trajectory_id, diffs[age == 0])
        stale.add(trajectory.trajectory_id, diffs[age != 0])
        ages.append(age.float())
    if not fresh.mean <= max_diff:
        raise TrainingError(
            f"update {num_updates}: the trainer's log-probabilities of the sampled tokens differ from the sampler's by "
            f"{fresh.mean:.2g} on average, more than {max_diff:g} (worst: {fresh.worst_id} with {fresh.worst:.2g}); "
            "check that both run the same weights on the same tokens and images"
        )
    staleness = torch.cat(ages)
    return {
        "trainer_sampler_logprob_diff": fresh.mean,
        "trainer_sampler_logprob_diff_stale": stale.mean,
        "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": float(staleness.max()) if len(staleness) else 0.0,
    }
