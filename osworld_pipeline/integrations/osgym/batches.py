"""Converts prompts and recorded steps to the batches that OSGym documents.

Shapes: B rows, P = max_prompt_length, R = max_response_length, T = P (prompts) or P + R (recorded steps). Prompts are
padded on the left, responses on the right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.integrations.osgym.encoding import EncodedPrompt, PromptEncoder

Batch = dict[str, Any]
"""Tensors: input_ids, attention_mask (B, T), position_ids (B, T) or (B, 3, T), and for recorded steps responses (B, R),
reward (B,) and, if the policy reports them, rollout_log_probs (B, R). Arrays of B objects: multi_modal_inputs,
multi_modal_data, raw_prompt_ids, worker_id, meta_info."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """A policy's prompt and response at one step, as tokens."""

    prompt: EncodedPrompt
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities of the sampled tokens, if the policy reports them."""


def prompt_row(encoder: PromptEncoder, prompt: EncodedPrompt, worker_id: int, meta_info: Mapping[str, Any]) -> Batch:
    return _row(encoder, prompt, (), encoder.max_length, 0) | {"worker_id": worker_id, "meta_info": dict(meta_info)}


def step_row(
    encoder: PromptEncoder,
    tokens: StepTokens,
    worker_id: int,
    meta_info: Mapping[str, Any],
    *,
    reward: float,
    max_response_length: int,
) -> Batch:
    """A recorded step with the sampled ids. A response longer than the limit keeps its beginning."""
    response_ids = tokens.response_ids[:max_response_length]
    row = _row(encoder, tokens.prompt, response_ids, encoder.max_length, max_response_length)
    responses = torch.full((max_response_length,), encoder.tokenizer.pad_token_id, dtype=torch.int64)
    responses[: len(response_ids)] = torch.tensor(response_ids, dtype=torch.int64)
    row |= {"responses": responses, "reward": torch.tensor(reward, dtype=torch.float32)}
    if tokens.logprobs is not None:
        logprobs = torch.zeros(max_response_length)
        logprobs[: len(response_ids)] = torch.tensor(tokens.logprobs[:max_response_length])
        row["rollout_log_probs"] = logprobs
    return row | {"worker_id": worker_id, "meta_info": dict(meta_info)}


def collate(rows: Sequence[Batch]) -> Batch:
    """Stacks tensors and makes arrays of B objects of the rest. Keys that some rows lack are omitted."""
    keys = [key for key in rows[0] if all(key in row for row in rows)]
    return {key: _together([row[key] for row in rows]) for key in keys}


def model_inputs(batch: Batch) -> Batch:
    """The arguments of `model(**inputs)` from a batch: ids, mask, positions (Qwen-VL's first axis is (time, height,
    width)) and the images of all rows."""
    inputs: Batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    positions = batch["position_ids"]
    inputs["position_ids"] = positions.transpose(0, 1) if positions.ndim == 3 else positions
    shown = [row for row in batch.get("multi_modal_inputs", ()) if row]
    for key in shown[0] if shown else ():
        inputs[key] = torch.cat([row[key] for row in shown])
    return inputs


def _row(
    encoder: PromptEncoder,
    prompt: EncodedPrompt,
    response_ids: Sequence[int],
    max_prompt_length: int,
    max_response_length: int,
) -> Batch:
    image_inputs = encoder.image_inputs(prompt.images)
    ids = (*prompt.token_ids, *response_ids)
    start = max_prompt_length - len(prompt.token_ids)
    span = slice(start, start + len(ids))
    length = max_prompt_length + max_response_length
    positions = encoder.positions(ids, image_inputs)
    input_ids = torch.full((length,), encoder.tokenizer.pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(length, dtype=torch.int64)
    position_ids = torch.zeros((*positions.shape[:-1], length), dtype=torch.int64)
    input_ids[span] = torch.tensor(ids, dtype=torch.int64)
    attention_mask[span] = 1
    position_ids[..., span] = torch.from_numpy(positions)
    row: Batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "raw_prompt_ids": list(prompt.raw_token_ids),
    }
    if encoder.processor is not None:
        row["multi_modal_inputs"] = image_inputs
        row["multi_modal_data"] = {"image": [open_picture(image) for image in prompt.images]}
    return row


def _together(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    # np.array would make a 2D table of lists with equal lengths.
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
