"""Converts token sequences and images to the input arrays of Qwen3-VL, with consistency checks.

Shapes: B sequences, T tokens of the longest, N images in the batch, P patches of all of them.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from osworld_pipeline.domain.pictures import open_picture

PixelValues = tuple[np.ndarray, np.ndarray]
"""(patches, patch values) as float32, and the grid (1, height, width) in patches."""


class PixelCache:
    """LRU cache of pixel values, by content hash. One cache serves one processor; thread-safe."""

    def __init__(self, *, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, PixelValues] = OrderedDict()
        self._lock = threading.Lock()

    def pixel_values(self, processor: Any, image: bytes) -> PixelValues:
        key = hashlib.sha256(image).hexdigest()
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        value = encode_image(processor, image)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = value
                self._num_bytes += value[0].nbytes
            while self._num_bytes > self._max_bytes and len(self._entries) > 1:
                _, (dropped, _) = self._entries.popitem(last=False)
                self._num_bytes -= dropped.nbytes
        return value


def encode_image(processor: Any, image: bytes) -> PixelValues:
    """The image processor's patches and grid of one encoded image."""
    with open_picture(image) as opened:
        outputs = processor.image_processor(images=[opened.convert("RGB")], return_tensors="np")
    return np.asarray(outputs["pixel_values"], dtype=np.float32), np.asarray(
        outputs["image_grid_thw"][0], dtype=np.int64
    )


def build_model_inputs(
    processor: Any,
    sequences: Sequence[tuple[Sequence[int], Sequence[bytes]]],
    *,
    padding_side: Literal["left", "right"] = "right",
    cache: PixelCache | None = None,
) -> dict[str, np.ndarray]:
    """input_ids, attention_mask and mm_token_type_ids (B, T); with images also pixel_values (P, values) and
    image_grid_thw (N, 3).

    Raises:
        ValueError: the placeholders and images of a sequence disagree in number or length; names the sequence.
    """
    if not sequences:
        raise ValueError("there are no sequences to build model inputs from")
    cache = cache or PixelCache()
    length = max(len(token_ids) for token_ids, _ in sequences)
    pad_id = processor.tokenizer.pad_token_id
    input_ids = np.full((len(sequences), length), pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    pixels: list[np.ndarray] = []
    grids: list[np.ndarray] = []
    for index, (token_ids, images) in enumerate(sequences):
        encoded = [cache.pixel_values(processor, image) for image in images]
        check_placeholders(processor, index, token_ids, [grid for _, grid in encoded])
        span = slice(length - len(token_ids), length) if padding_side == "left" else slice(0, len(token_ids))
        input_ids[index, span] = token_ids
        attention_mask[index, span] = 1
        pixels += [patches for patches, _ in encoded]
        grids += [grid for _, grid in encoded]
    # The padding id is not a placeholder, so a comparison finds images in the text only.
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "mm_token_type_ids": (input_ids == processor.image_token_id).astype(np.int64),
    }
    if pixels:
        inputs["pixel_values"] = np.concatenate(pixels)
        inputs["image_grid_thw"] = np.stack(grids)
    return inputs


def check_placeholders(
    processor: Any, sequence_index: int, token_ids: Sequence[int], grids: Sequence[np.ndarray]
) -> None:
    """Checks that each run of placeholders is as long as its image's tokens.

    Raises:
        ValueError: a run is not, the numbers of runs and images differ, or the sequence is empty or has a video
            placeholder; names the sequence.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"sequence {sequence_index} has no tokens")
    if processor.video_token_id is not None and (ids == processor.video_token_id).any():
        raise ValueError(f"sequence {sequence_index} holds a video placeholder, for which there is no video")
    is_image = np.concatenate(([0], (ids == processor.image_token_id).astype(np.int8), [0]))
    starts = np.flatnonzero(np.diff(is_image) == 1)
    ends = np.flatnonzero(np.diff(is_image) == -1)
    if len(starts) != len(grids):
        raise ValueError(
            f"sequence {sequence_index} has {len(starts)} runs of image placeholders and {len(grids)} images"
        )
    merge = processor.image_processor.merge_size**2
    for image_index, (start, end, grid) in enumerate(zip(starts, ends, grids, strict=True)):
        expected = int(grid.prod()) // merge
        if end - start != expected:
            raise ValueError(
                f"sequence {sequence_index}: image {image_index} has {end - start} placeholders where its pixels make "
                f"{expected} tokens"
            )


def rope_positions(processor: Any, token_ids: Sequence[int], grids: Sequence[np.ndarray]) -> np.ndarray:
    """(3, T): each token's position in time, height and width, in Qwen3-VL's scheme. Text advances all three by one; an
    image spans height and width, then advances by the longer of its sides. Placeholders and grids must agree
    (`check_placeholders`)."""
    merge = processor.image_processor.merge_size
    ids = np.asarray(token_ids, dtype=np.int64)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    starts = np.flatnonzero(np.diff(ids == processor.image_token_id, prepend=False, append=False))[::2]
    done = place = 0
    for start, grid in zip(starts, grids, strict=True):
        positions[:, done:start] = place + np.arange(start - done)
        place += start - done
        height, width = int(grid[1]) // merge, int(grid[2]) // merge
        done = start + height * width
        positions[0, start:done] = place
        positions[1, start:done] = place + np.repeat(np.arange(height), width)
        positions[2, start:done] = place + np.tile(np.arange(width), height)
        place += max(height, width)
    positions[:, done:] = place + np.arange(len(ids) - done)
    return positions
