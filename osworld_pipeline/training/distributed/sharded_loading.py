"""Loads a model's weights, each rank only its own part: no rank holds a whole model in memory.

The model is created without memory (`empty_model`) and sharded; then each rank reads its own slices from the
checkpoint's safetensors files (`load_shards`).
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.model import MatmulPatchEmbed

META = torch.device("meta")


def empty_model(folder: Path, *, dtype: torch.dtype, is_frozen: bool = False) -> Any:
    """The model of a checkpoint folder as `load_model` makes it, with weights on the meta device: names, shapes and
    dtypes without memory. Buffers are real.

    Raises:
        StoreError: the folder is missing, or has no valid Qwen3-VL configuration; names it.
    """
    if not folder.is_dir():
        raise StoreError(f"no checkpoint folder at {folder}: make or download the checkpoint first")
    if not (folder / "config.json").is_file():
        raise StoreError(f"the checkpoint at {folder} cannot be loaded: config.json is missing")
    try:
        config = Qwen3VLConfig.from_pretrained(folder, local_files_only=True)
        with META:
            model: Any = Qwen3VLForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise StoreError(f"the checkpoint at {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.tie_weights()
    model.model.visual.patch_embed = MatmulPatchEmbed(model.model.visual.patch_embed)
    for module in model.modules():
        _make_buffers(module)
    model.eval()
    if is_frozen:
        model.requires_grad_(False)
    return model


def _make_buffers(module: Any) -> None:
    """Computes rotary frequencies from the configuration, because no file contains them."""
    names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.device == META]
    if names:
        made = type(module)(module.config)
        for name in names:
            setattr(module, name, nn.Buffer(getattr(made, name), persistent=False))


def load_shards(model: Any, folder: Path, device: torch.device) -> int:
    """Fills a sharded model's weights that are on the meta device, each rank its own part, on `device`; returns the
    bytes that this rank has read. Tensors with memory (adapters) are unchanged.

    Raises:
        StoreError: a weight is missing, unknown, of another shape, or cannot be read; names it.
    """
    with ExitStack() as files:
        stored = _open_all(folder, files)
        expected = {_stored_name(name) for name, param in model.named_parameters() if param.is_meta}
        tied = {_stored_name(name) for name in model.all_tied_weights_keys}
        missing, unknown = sorted(expected - set(stored)), sorted(set(stored) - expected - tied)
        if missing or unknown:
            wrong = ", ".join([*missing, *unknown][:3])
            raise StoreError(f"the weights in {folder} are of another model, with missing or unknown names: {wrong}")
        names = {id(param): _stored_name(name) for name, param in model.named_parameters()}
        filled: dict[int, torch.Tensor] = {}
        num_bytes = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_bytes
            if not tensor.is_meta:
                return tensor
            key = id(tensor)  # a tied weight occurs once for each of its names
            if key not in filled:
                part = _read_part(stored[names[key]], names[key], tensor, folder)
                num_bytes += part.nbytes
                filled[key] = torch.empty_like(tensor, device=device)
                _own(filled[key]).copy_(part)
            return filled[key]

        # _apply instead of an assignment, because FSDP2 tracks its parameters there.
        with torch.no_grad():
            model._apply(fill)
    model.tie_weights()
    return num_bytes


def _open_all(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Every stored weight by name, without reading it."""
    found: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("model*.safetensors")):
            file: Any = files.enter_context(safe_open(path, framework="pt"))
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the weights in {folder} cannot be read ({error}): download or make them again") from error
    if not found:
        raise StoreError(f"no model.safetensors in {folder}: this is not a checkpoint in Hugging Face format")
    return found


def _stored_name(name: str) -> str:
    """The name in a plain model of a weight that has adapters."""
    return name.replace(".base_layer.", ".")


def _read_part(stored: Any, name: str, tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """This rank's rows of a stored weight; FSDP2 shards the first dimension."""
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise StoreError(
            f"the weights in {folder} are of another model: {name} is {tuple(stored.get_shape())}, not "
            f"{tuple(tensor.shape)}"
        )
    rows = slice(None)
    if isinstance(tensor, DTensor):
        start = tensor.device_mesh.get_local_rank() * -(-tensor.shape[0] // tensor.device_mesh.size())
        rows = slice(min(start, tensor.shape[0]), min(start, tensor.shape[0]) + _own(tensor).shape[0])
    try:
        return stored[rows]
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{name} in {folder} cannot be read ({error}): download or make it again") from error


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
