"""The trainer's forward pass: log-probabilities (and entropies) of a batch's response tokens.

Shapes: B sequences, T tokens, N response tokens of the batch, D hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.batch import Batch, build_batch, split_by_size
from osworld_pipeline.training.loss import token_logprobs

MICRO_BATCH_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class Scores:
    logprobs_BT: torch.Tensor
    """log p(token at t | tokens before t), float32; 0 outside the response mask."""
    entropy_BT: torch.Tensor
    """Zeros where it was not asked for."""


def score_responses(model: Any, batch: Batch, *, with_entropy: bool = False) -> Scores:
    """One forward pass; logits are made at response tokens only."""
    hidden_BTD = _hidden_states(model, batch)
    mask_BT = batch.response_mask_BT
    # The hidden state at t - 1 predicts the token at t.
    hidden_ND = hidden_BTD[:, :-1][mask_BT[:, 1:]]
    logprobs_N, entropy_N = token_logprobs(
        hidden_ND,
        batch.input_ids_BT[mask_BT],
        model.lm_head,
        vocab_size=model.config.text_config.vocab_size,
        with_entropy=with_entropy,
    )
    zeros_BT = torch.zeros(mask_BT.shape, dtype=logprobs_N.dtype, device=logprobs_N.device)
    return Scores(
        logprobs_BT=zeros_BT.masked_scatter(mask_BT, logprobs_N),
        entropy_BT=zeros_BT.masked_scatter(mask_BT, entropy_N),
    )


def _hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """The language model's last hidden states.

    Padding is on the right and attention is causal, so no real token ever looks at padding: leaving the attention mask
    out changes nothing and halves the attention's work.
    """
    core = model.model
    if batch.pixel_values is None or batch.image_grid_U3 is None:
        return core(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
    grid_I3 = batch.image_grid_U3[list(batch.image_index_I)]
    position_ids, _ = core.get_rope_index(
        batch.input_ids_BT, batch.image_mask_BT, image_grid_thw=grid_I3, attention_mask=batch.attention_mask_BT
    )
    return core(
        input_ids=batch.input_ids_BT,
        position_ids=position_ids,
        mm_encoder_outputs={"image": _image_features(core, batch)},
        use_cache=False,
    ).last_hidden_state


def _image_features(core: Any, batch: Batch) -> Any:
    """Each distinct image is encoded once and repeated where it stands again."""
    features = core.get_image_features(batch.pixel_values, batch.image_grid_U3, return_dict=True)
    features.pooler_output = [features.pooler_output[index] for index in batch.image_index_I]
    features.deepstack_features = [
        [layer[index] for index in batch.image_index_I] for layer in features.deepstack_features
    ]
    return features


def device_of(model: Any) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def score_trajectories(
    model: Any, processor: Any, trajectories: Sequence[Trajectory], *, cache: PixelCache | None = None
) -> list[torch.Tensor]:
    """Log-probabilities of each trajectory's tokens, aligned with its token_ids, on the CPU; no gradients."""
    by_id: dict[int, torch.Tensor] = {}
    index_of = {id(trajectory): index for index, trajectory in enumerate(trajectories)}
    for part, batch in micro_batches(model, processor, trajectories, cache=cache):
        logprobs_BT = score_responses(model, batch).logprobs_BT.cpu()
        for row, trajectory in enumerate(part):
            by_id[index_of[id(trajectory)]] = logprobs_BT[row, : len(trajectory.token_ids)]
    return [by_id[index] for index in range(len(trajectories))]


def micro_batches(
    model: Any,
    processor: Any,
    trajectories: Sequence[Trajectory],
    *,
    cache: PixelCache | None = None,
    max_sequences: int | None = None,
) -> Iterator[tuple[list[Trajectory], Batch]]:
    for part in split_by_size(trajectories, max_tokens=MICRO_BATCH_TOKENS, max_sequences=max_sequences):
        yield part, build_batch(processor, part, cache=cache, device=device_of(model))
