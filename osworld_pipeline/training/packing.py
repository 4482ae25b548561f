"""Several sequences in one row, with attention within each sequence."""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sdpa_by_sequence"
"""Name of the attention implementation in transformers' registry; without `packed_lengths` it is stock SDPA."""


def use_packed_attention(model: Any) -> None:
    """Adds support for `packed_lengths` to the language model; its vision tower and other calls are unchanged."""
    AttentionInterface.register(ATTENTION, _attend_by_sequence)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.model.language_model.config._attn_implementation = ATTENTION


def _attend_by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One causal kernel per sequence: no L x L mask is created, and no empty blocks are computed."""
    if packed_lengths is None or len(packed_lengths) == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    parts = zip(*(whole.split(packed_lengths, dim=2) for whole in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1), None
