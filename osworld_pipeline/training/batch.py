"""Trajectories as the tensors of one forward pass, right-padded, each distinct image once.

Shapes: B sequences, T tokens of the longest, I images in the text, U distinct images, P patches of these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osworld_pipeline.agent.model_inputs import PixelCache, check_placeholders
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Batch:
    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    image_mask_BT: torch.Tensor
    """Integer: 1 on image placeholders, as the model's mm_token_type_ids."""
    response_mask_BT: torch.Tensor
    """Boolean."""
    pixel_values: torch.Tensor | None
    """(P, values of a patch) of the distinct images."""
    image_grid_U3: torch.Tensor | None
    image_index_I: tuple[int, ...]
    """Which distinct image stands at each run of placeholders, in the order of the text."""

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask_BT.sum())


def build_batch(
    processor: Any,
    trajectories: Sequence[Trajectory],
    *,
    cache: PixelCache | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Checks placeholders, images and masks against each other on the way.

    Raises:
        TrainingError: a trajectory whose images and placeholders disagree, or that has nothing to learn from; names it.
    """
    cache = cache or PixelCache()
    length = max(len(trajectory.token_ids) for trajectory in trajectories)
    shape = (len(trajectories), length)
    input_ids = np.full(shape, processor.tokenizer.pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    response_mask = np.zeros(shape, dtype=bool)
    distinct: dict[str, int] = {}
    pixels: list[np.ndarray] = []
    grids: list[np.ndarray] = []
    image_index: list[int] = []
    for row, trajectory in enumerate(trajectories):
        num_tokens = len(trajectory.token_ids)
        input_ids[row, :num_tokens] = trajectory.token_ids
        attention_mask[row, :num_tokens] = 1
        response_mask[row, :num_tokens] = trajectory.response_mask
        first = len(image_index)
        for image in trajectory.images:
            key = digest_bytes(image)
            if key not in distinct:
                distinct[key] = len(pixels)
                patches, grid = cache.pixel_values(processor, image)
                pixels.append(patches)
                grids.append(grid)
            image_index.append(distinct[key])
        _check(processor, row, trajectory, [grids[index] for index in image_index[first:]])

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        input_ids_BT=tensor(input_ids),
        attention_mask_BT=tensor(attention_mask),
        image_mask_BT=tensor((input_ids == processor.image_token_id).astype(np.int64)),
        response_mask_BT=tensor(response_mask),
        pixel_values=tensor(np.concatenate(pixels)) if pixels else None,
        image_grid_U3=tensor(np.stack(grids)) if grids else None,
        image_index_I=tuple(image_index),
    )


def _check(processor: Any, row: int, trajectory: Trajectory, grids: Sequence[np.ndarray]) -> None:
    mask = trajectory.response_mask
    if not any(mask):
        raise TrainingError(f"trajectory {trajectory.trajectory_id} has no response tokens, so nothing to learn from")
    if mask[0]:
        raise TrainingError(f"trajectory {trajectory.trajectory_id} begins with a response: there is no prompt")
    try:
        check_placeholders(processor, row, trajectory.token_ids, grids)
    except ValueError as error:
        raise TrainingError(f"trajectory {trajectory.trajectory_id}: {error}") from error


def split_by_size(
    trajectories: Sequence[Trajectory], *, max_tokens: int, max_sequences: int | None = None
) -> Iterator[list[Trajectory]]:
    """Micro-batches of similar length: each holds at most `max_tokens` tokens with its padding, or one sequence."""
    part: list[Trajectory] = []
    for trajectory in sorted(trajectories, key=lambda item: (len(item.token_ids), item.trajectory_id)):
        is_full = len(trajectory.token_ids) * (len(part) + 1) > max_tokens or len(part) == max_sequences
        if part and is_full:
            yield part
            part = []
        part.append(trajectory)
    if part:
        yield part
