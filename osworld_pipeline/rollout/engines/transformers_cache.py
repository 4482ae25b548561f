"""Caches that the engine keeps between forward passes: keys and values of running rows and of episodes between turns,
and image features.

Shapes: B rows, S slots, H key/value heads, Q new tokens, C tokens that a slot holds, D head dimension.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osworld_pipeline.protocols import GenerateRequest

KV_MULTIPLE = 64
"""A decoding step attends over a multiple of this many positions. A CPU's attention sums a remainder in another order,
so otherwise a row's last digits would depend on the lengths of other rows."""
GROWTH = 256


class KvSlots:
    """Keys and values of running rows, one slot each, every row from position 0."""

    def __init__(self, config: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        """`config`: of the language model."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (config.num_key_value_heads, head_dim)
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_layers: int = config.num_hidden_layers
        self.num_slots = self.num_tokens = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def reserve(self, *, num_slots: int, num_tokens: int) -> None:
        """Grows to at least this number of slots and tokens; the content is kept."""
        num_tokens = -(-num_tokens // GROWTH) * GROWTH
        if num_slots <= self.num_slots and num_tokens <= self.num_tokens:
            return
        before = (slice(self.num_slots), slice(None), slice(self.num_tokens))
        self.num_slots, self.num_tokens = max(num_slots, self.num_slots), max(num_tokens, self.num_tokens)
        num_heads, head_dim = self._shape
        shape = (self.num_slots, num_heads, self.num_tokens, head_dim)
        for tensors in (self.keys, self.values):
            for layer in range(self.num_layers):
                # Zeros, because masked values are still multiplied by 0.
                grown = torch.zeros(shape, **self._options)
                if layer < len(tensors):
                    grown[before] = tensors[layer]
                    tensors[layer] = grown
                else:
                    tensors.append(grown)

    def move(self, *, source: int, target: int, num_tokens: int) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def copy_out(self, slot: int, num_tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        keys = [tensor[slot, :, :num_tokens].clone() for tensor in self.keys]
        return keys, [tensor[slot, :, :num_tokens].clone() for tensor in self.values]

    def copy_in(self, slot: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for tensors, kept in ((self.keys, keys), (self.values, values)):
            for tensor, layer in zip(tensors, kept, strict=True):
                tensor[slot, :, : layer.shape[1]] = layer

    def release(self) -> None:
        """Frees the memory; no row may run."""
        self.num_slots = self.num_tokens = 0
        self.keys, self.values = [], []


class PrefillView:
    """The cache of a forward pass over the new tokens of one row, after `start` tokens in its slot."""

    def __init__(self, slots: KvSlots, slot: int, start: int) -> None:
        self._slots = slots
        self._slot = slot
        self._start = start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self._start + key_states.shape[2]
        row = slice(self._slot, self._slot + 1)
        keys, values = self._slots.keys[layer_idx], self._slots.values[layer_idx]
        keys[row, :, self._start : end] = key_states
        values[row, :, self._start : end] = value_states
        if not self._start:
            return key_states, value_states
        return keys[row, :, :end], values[row, :, :end]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._start

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._start + query_length, 0


class DecodeView:
    """The cache of a forward pass over one new token of each of the first B slots."""

    def __init__(self, slots: KvSlots, lengths_B: torch.Tensor, num_places: int) -> None:
        self._slots = slots
        self._lengths_B = lengths_B
        self._rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        self._num_places = num_places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._slots.keys[layer_idx], self._slots.values[layer_idx]
        keys[self._rows_B, :, self._lengths_B] = key_states[:, :, 0]
        values[self._rows_B, :, self._lengths_B] = value_states[:, :, 0]
        rows = slice(len(self._rows_B))
        return keys[rows, :, : self._num_places], values[rows, :, : self._num_places]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptEpisode:
    """The cache of an episode after its last turn."""

    token_ids: tuple[int, ...]
    """The tokens of these keys and values."""
    images: tuple[bytes, ...]
    """The images among the tokens."""
    grids: tuple[np.ndarray, ...]
    keys: list[torch.Tensor]
    """(H, tokens, D) of each layer."""
    values: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def begins(self, token_ids: Sequence[int], images: Sequence[bytes]) -> bool:
        """Whether a prompt extends it by at least one token."""
        num_tokens = len(self.token_ids)
        return (
            len(token_ids) > num_tokens
            and tuple(token_ids[:num_tokens]) == self.token_ids
            and tuple(images[: len(self.images)]) == self.images
        )


class KeptEpisodes:
    """Episodes between two turns, with LRU eviction. Thread-safe."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, KeptEpisode] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request: GenerateRequest) -> KeptEpisode | None:
        """The cache of the request's episode, if its prompt extends it."""
        with self._lock:
            entry = self._entries.get(request.episode_id)
            if entry is None:
                return None
            self._entries.move_to_end(request.episode_id)
        return entry if entry.begins(request.token_ids, request.images) else None

    def put(self, episode_id: str, entry: KeptEpisode) -> None:
        with self._lock:
            self._remove(episode_id)
            self._entries[episode_id] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self._max_bytes:
                self._remove(next(iter(self._entries)))

    def forget(self, episode_id: str) -> None:
        with self._lock:
            self._remove(episode_id)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _remove(self, episode_id: str) -> None:
        entry = self._entries.pop(episode_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    embeddings: torch.Tensor
    """(tokens of the image, hidden size)."""
    deepstack: tuple[torch.Tensor, ...]
    """The same shape, for each of the first layers."""


class FeatureCache:
    """LRU cache of image features: in `window` mode each image is in several prompts."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, ImageFeatures] = OrderedDict()

    def get(self, image: bytes, compute: Callable[[], ImageFeatures]) -> ImageFeatures:
        entry = self._entries.get(image)
        if entry is None:
            entry = self._entries[image] = compute()
            self._num_bytes += _num_bytes(entry)
        self._entries.move_to_end(image)
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            self._num_bytes -= _num_bytes(self._entries.popitem(last=False)[1])
        return entry

    def __contains__(self, image: bytes) -> bool:
        return image in self._entries

    def clear(self) -> None:
        self._entries.clear()
        self._num_bytes = 0


def _num_bytes(features: ImageFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.embeddings, *features.deepstack))
