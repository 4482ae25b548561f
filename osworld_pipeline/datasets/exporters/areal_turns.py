"""An episode as AReaL's turns: one training sequence for each response. The prompt of a response is the whole text
before it, with the images.

Shapes: L tokens of a turn."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from osworld_pipeline.agent.model_inputs import check_placeholders
from osworld_pipeline.domain.episode import TokenSequence


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One response and its prompt."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Of the output tokens, like `logprobs`."""
    image_steps: tuple[int, ...]
    """The steps whose screenshots are in the prompt, in order."""


def split_turns(sequences: Iterable[TokenSequence], *, image_token_id: int) -> list[Turn]:
    """Each run of sampled tokens is a turn: a sequence has several in `append` mode and one in `window` mode.

    Raises:
        ValueError: a sequence begins with a response, or has more image placeholders in its prompts than images.
    """
    return [turn for sequence in sequences for turn in _turns_of(sequence, image_token_id)]


def _turns_of(sequence: TokenSequence, image_token_id: int) -> Iterator[Turn]:
    mask = np.concatenate(([0], np.asarray(sequence.response_mask, dtype=np.int8), [0]))
    starts, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    is_image = np.asarray(sequence.token_ids, dtype=np.int64) == image_token_id
    image_starts = np.flatnonzero(np.diff(np.concatenate(([0], is_image.astype(np.int8)))) == 1)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        num_images = int((image_starts < start).sum())
        if start == 0:
            raise ValueError("a sequence begins with a response: there is no prompt")
        if num_images > len(sequence.image_steps):
            raise ValueError(f"a prompt has {num_images} images, and {len(sequence.image_steps)} are known")
        yield Turn(
            prompt_ids=sequence.token_ids[:start],
            output_ids=sequence.token_ids[start:end],
            logprobs=sequence.sampled_logprobs[start:end],
            versions=sequence.policy_versions[start:end],
            image_steps=sequence.image_steps[:num_images],
        )


def turn_tensors(
    processor: Any, turn: Turn, grids: Sequence[np.ndarray], *, reward: float, is_multimodal: bool
) -> dict[str, np.ndarray]:
    """AReaL's keys, except `multi_modal_input`: each [1, L], `rewards` [1].

    Raises:
        ValueError: placeholders and images differ in number or in length.
    """
    check_placeholders(processor, 0, turn.prompt_ids, grids)
    num_prompt, num_output = len(turn.prompt_ids), len(turn.output_ids)

    def row(prompt: Any, output: Any, dtype: Any) -> np.ndarray:
        return np.concatenate([np.broadcast_to(np.asarray(prompt, dtype), num_prompt), np.asarray(output, dtype)])[None]

    tensors = {
        "input_ids": row(turn.prompt_ids, turn.output_ids, np.int64),
        "loss_mask": row(0, np.ones(num_output), np.int32),
        "logprobs": row(0.0, turn.logprobs, np.float32),
        "versions": row(-1, turn.versions, np.int32),
        "attention_mask": row(True, np.ones(num_output), np.bool_),
        "rewards": np.asarray([reward], dtype=np.float32),
    }
    if is_multimodal:
        kinds = np.asarray(turn.prompt_ids, dtype=np.int64) == processor.image_token_id
        tensors["mm_token_type_ids"] = row(kinds, np.zeros(num_output), np.int64)
    return tensors
