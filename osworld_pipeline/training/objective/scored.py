"""Old and reference log-probabilities and importance weights of each trajectory, computed before an update's first
optimiser step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection
from osworld_pipeline.training.objective.importance import ImportanceWeights, episode_indices, importance_weights


@dataclass(frozen=True, kw_only=True)
class ScoredTrajectory:
    """Its tensors are aligned with the trajectory's token_ids."""

    trajectory: Trajectory
    old_logprobs: torch.Tensor
    """Denominator of the ratio: the trainer's values before the update, or the sampler's (`gspo.old_logprobs`)."""
    ref_logprobs: torch.Tensor | None
    importance: torch.Tensor
    """Weights of the tokens; 1 for replay, which was not sampled in this run."""


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    items: tuple[ScoredTrajectory, ...]
    metrics: dict[str, float]
    effective_share: float
    """The same as importance.ImportanceWeights.effective_share."""


def score_batch(
    trajectories: Sequence[Trajectory],
    own: Sequence[torch.Tensor],
    refs: Sequence[torch.Tensor | None],
    settings: GspoSharedSection,
) -> ScoredBatch:
    """`own`: the trainer's log-probabilities from before the update; all are aligned with `trajectories`."""
    sampled = [index for index, one in enumerate(trajectories) if one.sampled_logprobs is not None]
    weights = _weights([trajectories[index] for index in sampled], [own[index] for index in sampled], settings)
    by_index = dict(zip(sampled, _spread(weights, [trajectories[index] for index in sampled]), strict=True))
    items = tuple(
        ScoredTrajectory(
            trajectory=trajectory,
            old_logprobs=_old(trajectory, own[index], settings),
            ref_logprobs=refs[index],
            importance=by_index.get(index, torch.ones(len(trajectory.token_ids))),
        )
        for index, trajectory in enumerate(trajectories)
    )
    return ScoredBatch(
        items=items,
        metrics={
            "effective_share": weights.effective_share,
            "importance_changed_share": weights.changed_share,
        },
        effective_share=weights.effective_share,
    )


def _weights(
    trajectories: Sequence[Trajectory], own: Sequence[torch.Tensor], settings: GspoSharedSection
) -> ImportanceWeights:
    indices = episode_indices([trajectory.episode_id for trajectory in trajectories])
    ratios, episodes = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.long)]
    for trajectory, logprobs, index in zip(trajectories, own, indices, strict=True):
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        ratio = (logprobs.double() - torch.tensor(trajectory.sampled_logprobs, dtype=torch.float64))[mask]
        ratios.append(ratio)
        episodes.append(torch.full((len(ratio),), index))
    return importance_weights(
        torch.cat(ratios),
        torch.cat(episodes),
        form=settings.importance,
        low=settings.importance_low,
        high=settings.importance_high,
    )


def _spread(weights: ImportanceWeights, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
    """The weights by trajectory, 1 outside the response mask."""
    parts = weights.weights_N.split([trajectory.num_response_tokens for trajectory in trajectories])
    spread: list[torch.Tensor] = []
    for trajectory, part in zip(trajectories, parts, strict=True):
        mask = torch.tensor(trajectory.response_mask, dtype=torch.bool)
        spread.append(torch.ones(len(mask)).masked_scatter(mask, part))
    return spread


def _old(trajectory: Trajectory, own: torch.Tensor, settings: GspoSharedSection) -> torch.Tensor:
    if settings.old_logprobs == "sampler" and trajectory.sampled_logprobs is not None:
        return torch.tensor(trajectory.sampled_logprobs, dtype=torch.float32)
    return own
