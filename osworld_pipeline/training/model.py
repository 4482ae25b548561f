"""Loads a checkpoint's weights, tiny or published, for training, as a frozen reference, or for sampling."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.adapters import find_adapter
from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes.schema import LoraSection, PretrainedModelSection, TinyModelSection
from osworld_pipeline.training.dtypes import DTYPES
from osworld_pipeline.training.weights import lora


class MatmulPatchEmbed(nn.Module):
    """Qwen3-VL's patch embedding as a matrix product.

    The stock module runs a 3D convolution whose kernel equals its stride; on a CPU its backward pass takes a quarter of
    the time of an update. Parameters and their names are the stock module's.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.proj: nn.Conv3d = stock.proj

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(hidden_states.view(-1, weight.shape[1]).to(weight.dtype), weight, self.proj.bias)


def load_model(
    path: Path | str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    is_frozen: bool = False,
) -> Qwen3VLForConditionalGeneration:
    """The model of a checkpoint folder; of an adapter checkpoint its base with the adapter, unmerged. A frozen one has
    no gradients.

    Raises:
        StoreError: the folder or its Qwen3-VL weights are missing, or an adapter's base is missing or differs; names
        it.
        DependencyError: peft is missing for an adapter.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StoreError(f"no checkpoint folder at {folder}: make or download the checkpoint first")
    adapter = find_adapter(folder)
    if adapter is not None:
        model: Any = load_model(lora.verified_base(adapter).folder, dtype=dtype, device=device)
        lora.add_saved_adapters(model, adapter)
        return model.requires_grad_(False) if is_frozen else model
    if not (folder / "config.json").is_file():
        # Without it transformers would build a model of 8 billion random parameters.
        raise StoreError(f"the checkpoint at {folder} cannot be loaded: config.json is missing")
    torch_dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    try:
        model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch_dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise StoreError(f"the checkpoint at {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.model.visual.patch_embed = MatmulPatchEmbed(model.model.visual.patch_embed)
    model.to(torch.device(device))
    model.eval()  # Qwen3-VL has no dropout: training and sampling compute the same function
    if is_frozen:
        model.requires_grad_(False)
    return model


def default_device() -> torch.device:
    """A CUDA device if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(section: TinyModelSection | PretrainedModelSection) -> torch.dtype:
    """Dtype of a recipe's weights; a tiny model is float32."""
    return DTYPES[section.dtype] if isinstance(section, PretrainedModelSection) else torch.float32


def load_policy(
    path: Path | str,
    section: TinyModelSection | PretrainedModelSection,
    *,
    device: str | torch.device | None = None,
    is_frozen: bool = False,
    adapters: LoraSection | None = None,
) -> Qwen3VLForConditionalGeneration:
    """`load_model` in the precision of the recipe's model. `device`: None for the default device. `adapters`: added to
    a checkpoint that has none, to load a trainer's factors into. Raises StoreError, DependencyError, RecipeError."""
    model = load_model(
        path,
        dtype=dtype_of(section),
        device=default_device() if device is None else device,
        is_frozen=is_frozen,
    )
    if adapters is not None and find_adapter(Path(path)) is None:
        lora.add_adapters(model, adapters, seed=0)
        if is_frozen:
            model.requires_grad_(False)
    return model
