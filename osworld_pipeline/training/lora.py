"""LoRA through peft: small trained factors beside frozen weights; checkpoints hold the merged weights, and the factors
beside them under adapter/.

A resumed run takes the frozen weights from where the first one took them, because merged weights cannot be parted
again to the bit; adapter/base.json says where that is.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from osworld_pipeline.errors import DependencyError, RecipeError, StoreError
from osworld_pipeline.recipes.schema import LoraSection

FOLDER = "adapter"
BASE_FILE = "base.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_BASE, _A, _B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"
_PEFT_PREFIX = "base_model.model."


def add_adapters(model: Any, section: LoraSection, *, seed: int) -> None:
    """Puts adapters on the language model's layers and freezes all else; a fresh adapter changes nothing.

    Raises:
        DependencyError: peft is not installed.
        RecipeError: no layer bears any of the names.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise DependencyError(f"trainer.lora needs peft ({error}): install the extra `lora`") from error
    if not any(_is_target(name, section) for name, _ in model.named_modules()):
        raise RecipeError(f"trainer.lora.target_modules: no layer is named {' or '.join(section.target_modules)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(section), model)
    if any(param.is_meta for name, param in model.named_parameters() if ".lora_" in name):
        _make_factors(model, section, seed=seed)
    for name, param in model.named_parameters():
        param.requires_grad_(".lora_" in name)
        if param.requires_grad:
            param.data = param.data.float()


def _make_factors(model: Any, section: LoraSection, *, seed: int) -> None:
    """peft moves fresh factors to where their layer is; on the meta device they would be lost. They are drawn again in
    host memory, in peft's own order, so that a seed gives the same ones to any number of ranks."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            base: Any = layer.get_base_layer()
            layer.lora_A["default"] = torch.nn.Linear(base.in_features, section.rank, bias=False)
            layer.lora_B["default"] = torch.nn.Linear(section.rank, base.out_features, bias=False)
            layer.reset_lora_parameters("default", True)


def peft_config(section: LoraSection) -> Any:
    from peft import LoraConfig

    names = "|".join(section.target_modules)
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType] - a float is right, only its annotation is not
        lora_dropout=section.dropout,
        target_modules=rf"model\.language_model\.layers\..*\.({names})",
    )


def _is_target(name: str, section: LoraSection) -> bool:
    return name.startswith("model.language_model.layers.") and name.rpartition(".")[2] in section.target_modules


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The frozen model alone: the reference policy, without a second copy of the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_weights(weights: Mapping[str, torch.Tensor], section: LoraSection) -> dict[str, torch.Tensor]:
    """A plain model's weights: those of the layers with the factors' product added in float32."""
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith((_A, _B)):
            continue
        if name.endswith(_BASE):
            stem = name.removesuffix(_BASE)
            delta = weights[stem + _B].float() @ weights[stem + _A].float() * (section.alpha / section.rank)
            merged[f"{stem}.weight"] = (tensor.float() + delta).to(tensor.dtype)
        else:
            merged[name.replace(".base_layer.", ".")] = tensor
    return merged


def save_adapter(
    folder: Path, weights: Mapping[str, torch.Tensor], section: LoraSection, *, base_folder: Path, place: Path
) -> None:
    """peft's own format. `place` is where `folder` will stand in the end; the way to the base is written from there."""
    folder.mkdir()
    factors = {
        _PEFT_PREFIX + name.replace(".default.weight", ".weight"): tensor.contiguous()
        for name, tensor in weights.items()
        if name.endswith((_A, _B))
    }
    save_file(factors, folder / WEIGHTS_FILE)
    peft_config(section).save_pretrained(folder)
    base = os.path.relpath(base_folder.resolve(), place.resolve())
    (folder / BASE_FILE).write_text(json.dumps({"base_folder": base}) + "\n")


def base_folder_of(adapter: Path) -> Path:
    """Where the frozen weights under an adapter lie. Raises StoreError."""
    path = adapter / BASE_FILE
    try:
        return (adapter.resolve() / json.loads(path.read_text())["base_folder"]).resolve()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): remove {adapter.parent} and run the stage again") from error


def load_adapter(model: Any, adapter: Path) -> None:
    """A saved adapter's factors into those of the model, as they were. Raises StoreError."""
    path = adapter / WEIGHTS_FILE
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read ({error}): remove {adapter.parent} and run the stage again") from error
    factors = {name: param for name, param in model.named_parameters() if ".lora_" in name}
    with torch.no_grad():
        for name, param in factors.items():
            key = _PEFT_PREFIX + name.replace(".default.weight", ".weight")
            if key not in saved or saved[key].shape != param.shape:
                raise StoreError(f"{path} is of another adapter ({name}): trainer.lora has changed since it was saved")
            param.copy_(saved[key])
