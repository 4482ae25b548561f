"""Loads weights into a model that is sampling: read from a checkpoint folder, validated, and copied in place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from osworld_pipeline.agent.adapters import ADAPTER, AdapterCheckpoint, find_adapter, is_factor, parameter_of
from osworld_pipeline.errors import EngineError, StoreError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_weights(folder: Path, *, model: Any, base_folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder, on the CPU, with their names in the model; of an adapter checkpoint its
    factors. `from_pretrained` is unsuitable: it changes torch's default dtype for all threads while it runs.

    Raises:
        EngineError: there are no weights, they are damaged, or an adapter does not belong to the model, whose
            whole weights are in `base_folder`; names the folder.
    """
    try:
        adapter = find_adapter(folder)
        if adapter is not None:
            _require_fit(adapter, model, base_folder)
            return {parameter_of(name): tensor for name, tensor in load_file(adapter.weights).items()}
        files = {SINGLE_FILE}
        if (folder / INDEX_FILE).exists():
            files = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(files):
            tensors |= load_file(folder / name)
    except (OSError, ValueError, KeyError, SafetensorError, StoreError) as error:
        raise EngineError(f"cannot load the weights at {folder}: {str(error).splitlines()[0]}") from error
    return tensors


def check_state(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names in the model: all of them, or all factors of its adapter. A tied tensor may have any
    of its names.

    Raises:
        ValueError: a tensor is missing, unexpected, or has another shape; names it.
    """
    own = model.state_dict()
    if state_dict and all(map(is_factor, state_dict)):
        own = {name: tensor for name, tensor in own.items() if is_factor(name)}
    surplus = sorted(set(state_dict) - set(own))
    if surplus:
        raise ValueError(f"the model has no {surplus[0]}")
    given = {own[name].data_ptr() for name in state_dict}
    for name, tensor in own.items():
        if name not in state_dict:
            if tensor.data_ptr() not in given:
                raise ValueError(f"{name} is missing")
        elif state_dict[name].shape != tensor.shape:
            there, here = tuple(state_dict[name].shape), tuple(tensor.shape)
            raise ValueError(f"{name} has the shape {there} there, and {here} in the model")
    return dict(state_dict)


def copy_state(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies in place, so that references to the model's parameters stay valid."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _require_fit(adapter: AdapterCheckpoint, model: Any, base_folder: Path | None) -> None:
    """Raises ValueError; shapes are left to `check_state`."""
    if base_folder is not None and adapter.base_folder.resolve() != base_folder.resolve():
        raise ValueError(f"it is an adapter of {adapter.base_folder}, and the model was read from {base_folder}")
    config = getattr(model, "peft_config", {}).get(ADAPTER)
    if config is None:
        raise ValueError("it is an adapter, and the model has no adapter to load it into")
    if config.lora_alpha != adapter.alpha:
        raise ValueError(f"its adapter has alpha {adapter.alpha:g}, and the model's has {config.lora_alpha:g}")
