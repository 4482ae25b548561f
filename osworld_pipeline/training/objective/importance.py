"""Importance weights for differences between sampler and trainer: other kernels, another precision, older weights.

With r_t = p_trainer(t) / p_sampler(t) at each response token t and r = the product of an episode's r_t, the weight of
token t is, by form:

    none               1
    token_truncate     min(r_t, high)                         TIS: slime's --use-tis, TRL's token_truncate
    token_mask         r_t inside [low, high], else 0         IcePop: slime's icepop_function, TRL's token_mask
    sequence_truncate  min(r, high)                           MIS: slime's tis_level sequence, TRL's sequence_truncate
    sequence_mask      r inside [low, high], else 0           slime's tis_mode mask, TRL's sequence_mask
    sequence_reject    1 if the geometric mean of the r_t     slime's rs_level geometric
                       is inside [low, high], else 0

Only `sequence_truncate` with a bound that is never reached is unbiased; its variance grows with the length. The others
trade bias for variance. An episode's sequences in `window` mode share one r, because they were sampled together.

Shapes: N response tokens, E episodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osworld_pipeline.recipes.training_sections import ImportanceForm
from osworld_pipeline.training.objective.loss import MAX_LOG_RATIO


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    weights_N: torch.Tensor
    """Weights without gradient, in float32."""
    effective_share: float
    """Kish's effective sample size over the number of samples, (sum w)^2 / (n sum w^2) (Kish 1965, Survey Sampling):
    over tokens for the token forms and `none` (with the r_t as weights), over episodes for the sequence forms. 1 on
    policy and for an empty batch; 0 if every weight is 0."""
    changed_share: float
    """Share of the samples whose ratio was truncated, masked or rejected."""


def importance_weights(
    log_ratio_N: torch.Tensor,
    episode_N: torch.Tensor,
    *,
    form: ImportanceForm,
    low: float,
    high: float,
) -> ImportanceWeights:
    """`log_ratio_N`: trainer minus sampler; `episode_N`: the index of each token's episode, from 0, without gaps."""
    if not len(log_ratio_N):
        return ImportanceWeights(weights_N=torch.zeros(0), effective_share=1.0, changed_share=0.0)
    log_ratio_N = log_ratio_N.double()
    if form == "none":
        ratios_N = _exp(log_ratio_N)
        return ImportanceWeights(
            weights_N=torch.ones(len(log_ratio_N)), effective_share=effective_share(ratios_N), changed_share=0.0
        )
    if form in ("token_truncate", "token_mask"):
        ratios = _exp(log_ratio_N)
    else:
        ratios = _exp(_by_episode(log_ratio_N, episode_N, is_mean=form == "sequence_reject"))
    if form.endswith("truncate"):
        weights, is_changed = ratios.clamp(max=high), ratios > high
    else:
        is_changed = (ratios < low) | (ratios > high)
        weights = (torch.ones_like(ratios) if form == "sequence_reject" else ratios).masked_fill(is_changed, 0.0)
    return ImportanceWeights(
        weights_N=(weights if form.startswith("token") else weights[episode_N]).float(),
        effective_share=effective_share(weights),
        changed_share=float(is_changed.double().mean()),
    )


def effective_share(weights: torch.Tensor) -> float:
    """The same as ImportanceWeights.effective_share."""
    total = float(weights.double().sum())
    return total * total / (len(weights) * float(weights.double().square().sum())) if total > 0 else 0.0


def _by_episode(values_N: torch.Tensor, episode_N: torch.Tensor, *, is_mean: bool) -> torch.Tensor:
    """Sums (or means) over each episode's tokens, of shape E."""
    num_episodes = int(episode_N.max()) + 1
    sums_E = torch.zeros(num_episodes, dtype=values_N.dtype).index_add(0, episode_N, values_N)
    return sums_E / torch.bincount(episode_N, minlength=num_episodes) if is_mean else sums_E


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def episode_indices(episode_ids: Sequence[str]) -> list[int]:
    """The index of each id among the distinct ones, in order of first occurrence."""
    known: dict[str, int] = {}
    return [known.setdefault(episode_id, len(known)) for episode_id in episode_ids]
