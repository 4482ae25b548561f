"""The losses as pure functions of tensors: no configuration, no logging, no device.

Shapes: B sequences, T tokens, N tokens selected from a batch, D hidden size. Masks are 1 on response tokens; values
elsewhere are ignored and may be infinite. Each sequence has at least one response token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_LOGITS = 1 << 26
"""Logits held in float32 at the same time (256 MB); a vocabulary of 150,000 would otherwise need gigabytes."""
BANNED_LOGIT = -1e30
"""Probability 0 in float32. Minus infinity would make 0 log 0 in the entropy a NaN."""
MAX_TOKEN_KL = 10.0
"""k3 is cut here: one token that the reference finds 1e10 times more likely must not dominate the update."""
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here on both sides before their exponential, so that no value or gradient overflows; a clamped
one has no gradient. A policy that moved by a factor of 5e8 is broken, and the clip fraction shows it."""

Algorithm = Literal["gspo", "grpo"]
LengthNorm = Literal["sequence_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


def token_logprobs(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    with_entropy: bool = False,
    temperature_N: torch.Tensor | None = None,
    banned_ids: torch.Tensor | None = None,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) of each position, and the distribution's entropy (zeros if not requested), under the sampling
    distribution: softmax of logits / temperature in which banned ids have probability 0. In float32, or float64 if
    logits are.

    `project` computes logits from hidden states, in chunks; with more than one chunk they are recomputed in the
    backward pass instead of being kept. Without temperatures they count as 1.
    """

    def chunk_logprobs(
        hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = project(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperatures is not None:
            logits = logits / temperatures[:, None]
        if banned_ids is not None:
            logits = logits.index_fill(-1, banned_ids, BANNED_LOGIT)
        all_logprobs = torch.log_softmax(logits, dim=-1)
        picked = all_logprobs.gather(-1, targets[:, None])[:, 0]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1) if with_entropy else torch.zeros_like(picked)
        return picked, entropy

    size = max(1, max_chunk_logits // vocab_size)
    if len(targets_N) <= size:
        return chunk_logprobs(hidden_ND, targets_N, temperature_N)
    chunks = range(0, len(targets_N), size)
    parts = [
        checkpoint(
            chunk_logprobs,
            hidden_ND[start : start + size],
            targets_N[start : start + size],
            None if temperature_N is None else temperature_N[start : start + size],
            use_reentrant=False,
        )
        for start in chunks
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def masked_mean_B(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's response tokens."""
    return _response_only(values_BT, mask_BT).sum(-1) / mask_BT.sum(-1)


def sft_loss(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, *, num_tokens: int | None = None) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens.

    `num_tokens`: those of the whole batch if this is a part of it, so that the parts' losses and gradients add up to
    the batch's.
    """
    total = -_response_only(logprobs_BT, mask_BT).sum()
    return total / (int(mask_BT.sum()) if num_tokens is None else num_tokens)


def token_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Schulman's estimators of KL(policy || reference) at tokens that the policy sampled (joschu.net/blog/kl-approx),
    with d = ref - logp:

        k1 = -d                no bias, high variance, sometimes negative
        k2 = d^2 / 2           low bias, low variance
        k3 = exp(d) - d - 1    no bias, low variance, never negative; cut at 10

    In a loss their gradients matter. In expectation over fresh samples, the gradient of k1 is only noise (it is that of
    logp, whose mean is 0), that of k2 is the gradient of KL(policy || reference), the usual divergence, and that of k3
    the gradient of KL(reference || policy), which is GRPO's choice.
    """
    diff = ref_logprobs - logprobs
    if estimator == "k1":
        return -diff
    if estimator == "k2":
        return 0.5 * diff.square()
    return (_safe_exp(diff) - diff - 1.0).clamp(max=MAX_TOKEN_KL)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss with gradient, and metrics of each sequence without."""

    loss: torch.Tensor
    ratio_B: torch.Tensor
    """Ratio of new to old policy; for grpo the mean over tokens."""
    clipped_B: torch.Tensor
    """Share of the ratios whose clipped term is the smaller one, so that the policy gets no gradient: 0 or 1 for gspo,
    a share of the tokens for grpo."""
    kl_B: torch.Tensor
    """Mean over tokens; zeros without a reference."""
    entropy_B: torch.Tensor
    """Mean over tokens; zeros if it was not requested."""
    importance_B: torch.Tensor
    """Mean importance weight over tokens; ones if none were given."""


def policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    algorithm: Algorithm,
    clip_low: float,
    clip_high: float,
    length_norm: LengthNorm = "sequence_mean",
    max_response_tokens: int | None = None,
    ref_logprobs_BT: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_BT: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    importance_BT: torch.Tensor | None = None,
    weights_B: torch.Tensor | None = None,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
) -> PolicyLoss:
    """Clipped policy optimisation, y_i the response tokens of sequence i:

        gspo  s_i   = exp(mean over t of (logp - old_logp))   one ratio a sequence (arXiv 2507.18071)
        grpo  s_i,t = exp(logp - old_logp)                    one a token (arXiv 2402.03300)
        term  = -c_t min(s A_i, clip(s, 1 - clip_low, 1 + clip_high) A_i)
        l_i   = mean over t of (term + kl_coef kl - entropy_coef H)

        sequence_mean  loss = 1/n sum_i w_i l_i               (GRPO, GSPO)
        token_mean     loss = 1/N sum_i w_i |y_i| l_i         (DAPO, arXiv 2503.14476)
        constant       loss = 1/(n L) sum_i w_i |y_i| l_i     (Dr. GRPO, arXiv 2503.20783), L = max_response_tokens

    n is B and N the sum of |y_i|, or `num_sequences` and `num_tokens` of the larger batch that this is a part of; parts
    then add up to it. w_i is 1 if no weights are given; neither n nor N counts weights, so a replay weight of 0.5
    halves that sequence's contribution.

    c_t is 1, or the importance weight of the token, without gradient (training/objective/importance.py); the old
    log-probabilities are then the trainer's own from before the update. It applies to neither KL nor entropy.

    Raises:
        ValueError: length_norm `constant` without max_response_tokens.
    """
    if length_norm == "constant" and max_response_tokens is None:
        raise ValueError("length_norm constant divides by max_response_tokens: give it")

    def per_ratio(values_BT: torch.Tensor) -> torch.Tensor:
        """(B, 1) for gspo, (B, T) for grpo."""
        return masked_mean_B(values_BT, mask_BT)[:, None] if algorithm == "gspo" else _response_only(values_BT, mask_BT)

    def per_sequence(values: torch.Tensor) -> torch.Tensor:
        return values[:, 0] if algorithm == "gspo" else masked_mean_B(values, mask_BT)

    ratio = _safe_exp(per_ratio(logprobs_BT - old_logprobs_BT))
    free = ratio * advantages_B[:, None]
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_B[:, None]
    term = -torch.minimum(free, clipped)
    importance_B = torch.ones_like(ratio[:, 0])
    if importance_BT is None:
        loss_B = per_sequence(term)
    else:
        importance_BT = _response_only(importance_BT.detach().to(term.dtype), mask_BT)
        importance_B = masked_mean_B(importance_BT, mask_BT)
        loss_B = masked_mean_B(importance_BT * term, mask_BT)
    kl_B = entropy_B = torch.zeros_like(loss_B)
    if ref_logprobs_BT is not None:
        # Values outside the mask are arbitrary: they are zeroed before the exponential.
        own_BT, ref_BT = _response_only(logprobs_BT, mask_BT), _response_only(ref_logprobs_BT, mask_BT)
        kl_B = masked_mean_B(token_kl(own_BT, ref_BT, kl_estimator), mask_BT)
        loss_B = loss_B + kl_coef * kl_B
    if entropy_BT is not None:
        entropy_B = masked_mean_B(entropy_BT, mask_BT)
        loss_B = loss_B - entropy_coef * entropy_B
    if weights_B is not None:
        loss_B = loss_B * weights_B
    return PolicyLoss(
        loss=_normalised(loss_B, mask_BT, length_norm, num_sequences, num_tokens, max_response_tokens),
        ratio_B=per_sequence(ratio).detach(),
        clipped_B=per_sequence((clipped < free).to(ratio.dtype)).detach(),
        kl_B=kl_B.detach(),
        entropy_B=entropy_B.detach(),
        importance_B=importance_B,
    )


def _normalised(
    loss_B: torch.Tensor,
    mask_BT: torch.Tensor,
    length_norm: LengthNorm,
    num_sequences: int | None,
    num_tokens: int | None,
    max_response_tokens: int | None,
) -> torch.Tensor:
    count = len(loss_B) if num_sequences is None else num_sequences
    if length_norm == "sequence_mean":
        return loss_B.sum() / count
    lengths_B = mask_BT.sum(-1)
    if length_norm == "token_mean":
        return (loss_B * lengths_B).sum() / (int(lengths_B.sum()) if num_tokens is None else num_tokens)
    return (loss_B * lengths_B).sum() / (count * (max_response_tokens or 1))


def _response_only(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Zeros elsewhere, in values and gradients: multiplying by the mask would turn infinities into NaN."""
    return torch.where(mask_BT.bool(), values_BT, 0.0)


def _safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
