"""The losses as pure functions of numbers: no configuration, no logging, no device.

Shapes: B sequences, T tokens, N tokens picked out of a batch, D hidden size. Masks are 1 on response tokens; only
there do values count. Each sequence has at least one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_LOGITS = 1 << 26
"""Logits held in float32 at once (256 MB); a vocabulary of 150,000 would otherwise need gigabytes."""
MAX_TOKEN_KL = 10.0
"""`low_var_kl` is cut here: one token that the reference finds 1e10 times likelier must not be the whole update."""


def token_logprobs(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    with_entropy: bool = False,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) of each position in float32, and the distribution's entropy (zeros where not asked for).

    `project` makes logits of hidden states. Logits are made in chunks; beyond one chunk they are made again in the
    backward pass instead of being kept.
    """

    def chunk_logprobs(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_logprobs = torch.log_softmax(project(hidden).float(), dim=-1)
        picked = all_logprobs.gather(-1, targets[:, None])[:, 0]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1) if with_entropy else torch.zeros_like(picked)
        return picked, entropy

    size = max(1, max_chunk_logits // vocab_size)
    if len(targets_N) <= size:
        return chunk_logprobs(hidden_ND, targets_N)
    parts = [
        checkpoint(chunk_logprobs, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def masked_mean_B(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's response tokens."""
    mask_BT = mask_BT.to(values_BT.dtype)
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1)


def sft_loss(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, *, num_tokens: int | None = None) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens.

    `num_tokens`: those of the whole batch where this is a part of it, so that the parts' losses and gradients add up to
    the batch's.
    """
    total = -(logprobs_BT * mask_BT.to(logprobs_BT.dtype)).sum()
    return total / (int(mask_BT.sum()) if num_tokens is None else num_tokens)


@dataclass(frozen=True, kw_only=True)
class GspoLoss:
    """The loss with gradient, and each sequence's figures without."""

    loss: torch.Tensor
    ratio_B: torch.Tensor
    is_clipped_B: torch.Tensor
    """Where the clipped term is the smaller one, so that the policy gets no gradient."""
    kl_B: torch.Tensor
    entropy_B: torch.Tensor


def gspo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs_BT: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_BT: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    weights_B: torch.Tensor | None = None,
    num_sequences: int | None = None,
) -> GspoLoss:
    """Group sequence policy optimisation.

        s_i  = exp(mean over response tokens of (logp - old_logp))
        kl_i = mean over response tokens of min(exp(ref - logp) - (ref - logp) - 1, 10)
        loss = 1/n sum_i w_i (-min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
                              + kl_coef kl_i - entropy_coef H_i)

    n is B, or `num_sequences` where this is a part of a larger batch; parts then add up to it. w_i is 1 where no
    weights are given; n counts sequences, not weights, so a replay weight of 0.5 halves that sequence's pull.
    """
    mask_BT = mask_BT.to(logprobs_BT.dtype)
    ratio_B = torch.exp(masked_mean_B(logprobs_BT - old_logprobs_BT, mask_BT))
    free_B = ratio_B * advantages_B
    clipped_B = ratio_B.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_B
    term_B = -torch.minimum(free_B, clipped_B)
    kl_B = torch.zeros_like(ratio_B)
    if ref_logprobs_BT is not None:
        # Outside the mask both are whatever they are: the difference is zeroed before the exponential.
        diff_BT = (ref_logprobs_BT - logprobs_BT) * mask_BT
        kl_B = masked_mean_B((torch.exp(diff_BT) - diff_BT - 1.0).clamp(max=MAX_TOKEN_KL), mask_BT)
        term_B = term_B + kl_coef * kl_B
    entropy_B = torch.zeros_like(ratio_B)
    if entropy_BT is not None:
        entropy_B = masked_mean_B(entropy_BT, mask_BT)
        term_B = term_B - entropy_coef * entropy_B
    if weights_B is not None:
        term_B = term_B * weights_B
    return GspoLoss(
        loss=term_B.sum() / (len(term_B) if num_sequences is None else num_sequences),
        ratio_B=ratio_B.detach(),
        is_clipped_B=(clipped_B < free_B).detach(),
        kl_B=kl_B.detach(),
        entropy_B=entropy_B.detach(),
    )
