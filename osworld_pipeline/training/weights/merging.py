"""Merges an adapter into its base's weights, for programs that cannot load adapters. Only this module merges.

The merged weights are rounded to the target's precision, so the result differs slightly from what was trained; in
bfloat16 a small adapter is almost lost. The rounding error measures this.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from osworld_pipeline.agent.adapters import WHOLE_WEIGHTS, AdapterCheckpoint, find_adapter
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.dtypes import DTYPES
from osworld_pipeline.training.weights.lora import verified_base

INDEX_FILE = "model.safetensors.index.json"
COPIED = ("*.json", "*.jinja", "*.txt")
NOT_COPIED = ("manifest.json", "checkpoint.json", "trainer_state.json", "stage_params.json", "export.json", INDEX_FILE)
"""Files about the base, not about the merged weights: those that our own stages add, and the index, which is written
anew."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    rounding_error: float
    """Norm of the rounding error of the merged layers, over the norm of the adapter's change to them."""
    num_layers: int
    base_digest: str


def write_merged(checkpoint: Path, folder: Path, *, dtype: str) -> Merged:
    """Writes the adapter checkpoint as whole weights of `dtype`, with the base's other files, to an existing empty
    folder. The sum is computed in float32.

    Raises:
        StoreError: `checkpoint` has no adapter, its base is missing or differs, or a file cannot be read.
    """
    adapter = find_adapter(checkpoint)
    if adapter is None:
        raise StoreError(f"{checkpoint} has no adapter to merge: it holds whole weights, or is not a checkpoint")
    base = verified_base(adapter)
    tally = _Tally()
    factors = _factors(adapter)
    num_bytes = 0
    for path in sorted(base.folder.glob(WHOLE_WEIGHTS)):
        weights = _merge(_load(path), factors, adapter.alpha / adapter.rank, DTYPES[dtype], tally)
        save_file(weights, folder / path.name, metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in weights.values())
    missing = sorted(factors.keys() - tally.layers)
    if missing:
        raise StoreError(f"{base.folder} has no weights of {missing[0]}, which the adapter {adapter.folder} changes")
    _copy_files(base.folder, folder, dtype=dtype, num_bytes=num_bytes)
    return Merged(rounding_error=tally.rounding_error, num_layers=len(tally.layers), base_digest=base.digest)


class _Tally:
    """Squares of norms, over all layers."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self._lost = 0.0
        self._learned = 0.0

    def add(self, layer: str, *, lost: torch.Tensor, delta: torch.Tensor) -> None:
        self.layers.add(layer)
        self._lost += float(lost.square().sum())
        self._learned += float(delta.square().sum())

    @property
    def rounding_error(self) -> float:
        """0 for an adapter without any change."""
        return math.sqrt(self._lost / self._learned) if self._learned else 0.0


def _merge(
    weights: Mapping[str, torch.Tensor],
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    dtype: torch.dtype,
    tally: _Tally,
) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer not in factors or name == layer:
            merged[name] = weight.to(dtype) if weight.is_floating_point() else weight
            continue
        a, b = factors[layer]
        if (b.shape[0], a.shape[1]) != weight.shape:
            raise StoreError(f"the adapter's factors of {layer} do not fit its weights of shape {tuple(weight.shape)}")
        merged[name] = (weight.float() + b.float() @ a.float() * scale).to(dtype)
        delta = b.double() @ a.double() * scale
        tally.add(layer, lost=merged[name].double() - weight.double() - delta, delta=delta)
    return merged


def _factors(adapter: AdapterCheckpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each layer."""
    saved = {name.removeprefix("base_model.model."): tensor for name, tensor in _load(adapter.weights).items()}
    return {layer: (saved[f"{layer}.lora_A.weight"], saved[f"{layer}.lora_B.weight"]) for layer in adapter.layers}


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _copy_files(source: Path, target: Path, *, dtype: str, num_bytes: int) -> None:
    for path in _files(source):
        shutil.copyfile(path, target / path.name)
    config = target / "config.json"
    config.write_text(json.dumps(_with_dtype(json.loads(config.read_text()), dtype), indent=2) + "\n")
    if (source / INDEX_FILE).is_file():
        index = json.loads((source / INDEX_FILE).read_text())
        index["metadata"] = {**index.get("metadata", {}), "total_size": num_bytes}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _files(source: Path) -> Iterator[Path]:
    for pattern in COPIED:
        yield from (path for path in sorted(source.glob(pattern)) if path.name not in NOT_COPIED)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Sets it at the top and everywhere else where it occurs."""
    result: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            result[name] = _with_dtype(value, dtype) if {"dtype", "torch_dtype"} & value.keys() else value
        elif name != "torch_dtype":
            result[name] = value
    return result | {"dtype": dtype}
