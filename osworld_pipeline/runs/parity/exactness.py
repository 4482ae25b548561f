"""Compares the trainer's forward pass over recorded episodes, token by token, with the log-probabilities that the
sampler reported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.rollout.trajectories import ReadBlob, episode_trajectories


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    num_sequences: int
    num_tokens: int
    """Number of sampled tokens compared."""
    max_diff: float
    """Largest |trainer - sampler| of a token's log-probability; NaN if any of them is NaN."""
    mean_diff: float
    worst_trajectory: str
    """The trajectory with `max_diff`."""

    def require(self, *, max_diff: float) -> None:
        """
        Raises:
            TrainingError: a token differs by more, or there are no tokens to compare.
        """
        if not self.num_tokens:
            raise TrainingError("there are no sampled tokens to compare: run episodes with this policy first")
        if not self.max_diff <= max_diff:
            raise TrainingError(
                f"trajectory {self.worst_trajectory}: the trainer's log-probability of a sampled token differs from "
                f"the sampler's by {self.max_diff:.2g}, more than {max_diff:g}; check that both run the same weights "
                "on the same tokens and images"
            )


def compare_logprobs(
    episodes: Sequence[Episode],
    read_blob: ReadBlob,
    model: Any,
    processor: Any,
    *,
    policy_version: int | None = None,
    cache: PixelCache | None = None,
) -> ExactnessReport:
    """Compares all valid episodes with sampled tokens. `model` holds the weights that sampled them; with
    `policy_version` only tokens of that version are compared.

    Raises:
        TrainingError: the images and placeholders of a sequence disagree; names the sequence.
        StoreError: a screenshot is missing.
    """
    trajectories = [
        trajectory
        for episode in episodes
        if episode.outcome.is_valid and any(any(sequence.response_mask) for sequence in episode.sequences)
        for trajectory in episode_trajectories(episode, read_blob)
    ]
    return compare_trajectories(trajectories, model, processor, policy_version=policy_version, cache=cache)


def compare_trajectories(
    trajectories: Sequence[Trajectory],
    model: Any,
    processor: Any,
    *,
    policy_version: int | None = None,
    cache: PixelCache | None = None,
) -> ExactnessReport:
    """Does the same as compare_logprobs. Raises TrainingError, StoreError."""
    import torch

    from osworld_pipeline.training.objective.score import score_trajectories

    num_tokens, total, worst, worst_trajectory = 0, 0.0, 0.0, ""
    scored = score_trajectories(model, processor, trajectories, cache=cache) if trajectories else []
    for trajectory, logprobs in zip(trajectories, scored, strict=True):
        assert trajectory.sampled_logprobs is not None, "episodes have sampled log-probabilities"
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        if policy_version is not None and trajectory.policy_versions is not None:
            mask &= torch.tensor(trajectory.policy_versions) == policy_version
        diffs = (logprobs - torch.tensor(trajectory.sampled_logprobs))[mask].abs()
        if not len(diffs):
            continue
        num_tokens, total = num_tokens + len(diffs), total + float(diffs.sum())
        # NaN counts as the largest difference.
        if not (float(diffs.max()) <= worst or math.isnan(worst)):
            worst, worst_trajectory = float(diffs.max()), trajectory.trajectory_id
    return ExactnessReport(
        num_sequences=len(trajectories),
        num_tokens=num_tokens,
        max_diff=worst,
        mean_diff=total / max(num_tokens, 1),
        worst_trajectory=worst_trajectory,
    )
