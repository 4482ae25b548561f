"""Logits in float32, for the trainer and the sampler of this process alike.

A bfloat16 number has 8 significant bits: a logit between 16 and 32 is rounded to a multiple of 0.125. Sampler and
trainer compute the hidden states in different shapes, so their logits would be rounded to different multiples, and the
ratios of an update would differ from 1 before the policy has changed (MiniMax-M1, arXiv 2506.13585).
sglang computes the same with `--enable-fp32-lm-head`.
"""

from typing import Any

import torch
from torch import nn

ROWS = 2048
"""Rows of the weight that a CPU converts at a time: they stay in its cache."""


def project_logits(lm_head: nn.Module, hidden_ND: torch.Tensor) -> torch.Tensor:
    """Logits of hidden states, shape (N, V), from products summed in float32 and not rounded to the model's dtype;
    float64 for a float64 model. Gradients are computed in the model's dtype. A head with a bias, or of another class
    than nn.Linear, is called as it is: its logits have its own dtype."""
    is_plain = type(lm_head) is nn.Linear and lm_head.bias is None
    if is_plain and lm_head.weight.dtype in (torch.bfloat16, torch.float16):
        return _WideProduct.apply(hidden_ND, lm_head.weight)
    return lm_head(hidden_ND)


class _WideProduct(torch.autograd.Function):
    """hidden @ weight.T of 16-bit matrices as float32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        if hidden_ND.is_cuda and torch.version.cuda:
            return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
        wide_ND = hidden_ND.float()
        return torch.cat([wide_ND @ rows_RD.float().T for rows_RD in weight_VD.split(ROWS)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_NV = grads[0].to(weight_VD.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            grad_NV @ weight_VD if needs_hidden else None,
            grad_NV.T @ hidden_ND if needs_weight else None,
        )
