"""Converts trajectories to the tensors of one forward pass: right-padded, or packed into one row; distinct images once.

Shapes: B sequences, T tokens of the longest, R rows and L positions of a row (B and T if padded; 1 and the total
if packed), N response tokens of all sequences, I images in the text, U distinct images, P patches of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osworld_pipeline.agent.model_inputs import PixelCache, check_placeholders, rope_positions
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.trajectory import LazyImages, Trajectory
from osworld_pipeline.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Batch:
    input_ids_RL: torch.Tensor
    position_ids_3RL: torch.Tensor
    """Time, height and width of each token in its own sequence."""
    response_mask_RL: torch.Tensor
    """Boolean, in the layout of the ids."""
    response_mask_BT: torch.Tensor
    """The same by sequence, as the losses need it."""
    packed_lengths: tuple[int, ...] | None
    """Lengths of the sequences in the single row; None if padded."""
    pixel_values: torch.Tensor | None
    """(P, values of a patch) of the distinct images."""
    image_grid_U3: torch.Tensor | None
    image_index_I: tuple[int, ...]
    """Index of the distinct image at each run of placeholders, in text order."""
    num_tokens: int
    """Number of tokens without padding."""
    temperature_N: torch.Tensor | None = None
    """Temperature of each response token, sequence by sequence; None if all are 1."""
    banned_ids: torch.Tensor | None = None
    """Ids that the policy never samples; None if there are none."""

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask_BT.sum())


def build_batch(
    processor: Any,
    trajectories: Sequence[Trajectory],
    *,
    cache: PixelCache | None = None,
    device: torch.device | str = "cpu",
    is_packed: bool = False,
    banned_ids: Sequence[int] = (),
) -> Batch:
    """Builds the batch and checks that placeholders, images and masks agree. `banned_ids`: `Renderer.banned_ids`, if
    the batch is scored as the policy samples.

    Raises:
        TrainingError: a trajectory has mismatched images and placeholders, no prompt, no response tokens, or a banned
            id in a response; names it.
    """
    cache = cache or PixelCache()
    images = _Images(processor, cache)
    banned = frozenset(banned_ids)
    lengths = tuple(len(trajectory.token_ids) for trajectory in trajectories)
    positions: list[np.ndarray] = []
    for row, trajectory in enumerate(trajectories):
        grids = images.add(trajectory.images)
        _check(processor, row, trajectory, grids)
        _check_banned(trajectory, banned)
        positions.append(rope_positions(processor, trajectory.token_ids, grids))
    rows = [np.asarray(trajectory.token_ids, dtype=np.int64) for trajectory in trajectories]
    masks = [np.asarray(trajectory.response_mask, dtype=bool) for trajectory in trajectories]
    lay_out = _packed if is_packed else _padded

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        input_ids_RL=tensor(lay_out(rows, processor.tokenizer.pad_token_id)),
        position_ids_3RL=tensor(np.stack([lay_out([part[axis] for part in positions], 0) for axis in range(3)])),
        response_mask_RL=tensor(lay_out(masks, False)),
        response_mask_BT=tensor(_padded(masks, False)),
        packed_lengths=lengths if is_packed else None,
        pixel_values=tensor(np.concatenate(images.pixels)) if images.pixels else None,
        image_grid_U3=tensor(np.stack(images.grids)) if images.grids else None,
        image_index_I=tuple(images.index),
        num_tokens=sum(lengths),
        temperature_N=_temperatures(trajectories, device),
        banned_ids=torch.tensor(sorted(banned), device=device) if banned else None,
    )


def _temperatures(trajectories: Sequence[Trajectory], device: torch.device | str) -> torch.Tensor | None:
    if all(trajectory.temperature == 1.0 for trajectory in trajectories):
        return None
    temperature_B = torch.tensor([trajectory.temperature for trajectory in trajectories], device=device)
    num_tokens_B = torch.tensor([trajectory.num_response_tokens for trajectory in trajectories], device=device)
    return temperature_B.repeat_interleave(num_tokens_B)


class _Images:
    """The distinct images of a batch, in order of first occurrence."""

    def __init__(self, processor: Any, cache: PixelCache) -> None:
        self._processor, self._cache = processor, cache
        self._known: dict[str, int] = {}
        self.pixels: list[np.ndarray] = []
        self.grids: list[np.ndarray] = []
        self.index: list[int] = []

    def add(self, images: Sequence[bytes]) -> list[np.ndarray]:
        """Adds a trajectory's images; returns their grids."""
        first = len(self.index)
        keys = images.sha256s if isinstance(images, LazyImages) else [digest_bytes(image) for image in images]
        for position, key in enumerate(keys):
            if key not in self._known:
                self._known[key] = len(self.pixels)
                patches, grid = self._cache.pixel_values(self._processor, images[position])
                self.pixels.append(patches)
                self.grids.append(grid)
            self.index.append(self._known[key])
        return [self.grids[index] for index in self.index[first:]]


def _padded(rows: Sequence[np.ndarray], fill: int) -> np.ndarray:
    padded = np.full((len(rows), max(map(len, rows))), fill, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _packed(rows: Sequence[np.ndarray], fill: int) -> np.ndarray:
    return np.concatenate(rows)[None]


def _check_banned(trajectory: Trajectory, banned: frozenset[int]) -> None:
    if not banned:
        return
    for token_id, is_response in zip(trajectory.token_ids, trajectory.response_mask, strict=True):
        if is_response and token_id in banned:
            raise TrainingError(
                f"trajectory {trajectory.trajectory_id} has the id {token_id} in a response, which no policy samples "
                "(a placeholder, or beyond the tokenizer): it comes from another sampler or another tokenizer"
            )


def _check(processor: Any, row: int, trajectory: Trajectory, grids: Sequence[np.ndarray]) -> None:
    mask = trajectory.response_mask
    if not any(mask):
        raise TrainingError(f"trajectory {trajectory.trajectory_id} has no response tokens, so it cannot be trained on")
    if mask[0]:
        raise TrainingError(f"trajectory {trajectory.trajectory_id} begins with a response: there is no prompt")
    try:
        check_placeholders(processor, row, trajectory.token_ids, grids)
    except ValueError as error:
        raise TrainingError(f"trajectory {trajectory.trajectory_id}: {error}") from error
