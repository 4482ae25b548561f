"""Weights for a model that is sampling: read from a checkpoint folder, checked against the model, copied in place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from osworld_pipeline.errors import EngineError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder, on the CPU, under the names in its files. `from_pretrained` is not for this:
    it changes torch's default type for every thread while it runs.

    Raises:
        EngineError: no weights there, or damaged ones; names the folder.
    """
    try:
        files = {SINGLE_FILE}
        if (folder / INDEX_FILE).exists():
            files = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(files):
            tensors |= load_file(folder / name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"cannot load the weights at {folder}: {str(error).splitlines()[0]}") from error
    return tensors


def check_state(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names of the model's own; a tied one may be given under any of its names.

    Raises:
        ValueError: one is missing, too many, or of another shape; names it.
    """
    own = model.state_dict()
    surplus = sorted(set(state_dict) - set(own))
    if surplus:
        raise ValueError(f"the model has no {surplus[0]}")
    given = {own[name].data_ptr() for name in state_dict}
    for name, tensor in own.items():
        if name not in state_dict:
            if tensor.data_ptr() not in given:
                raise ValueError(f"{name} is missing")
        elif state_dict[name].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(state_dict[name].shape)} there and {tuple(tensor.shape)} in the model")
    return dict(state_dict)


def copy_state(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """In place, so that whoever holds the model's parameters keeps them."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
