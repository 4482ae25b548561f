"""LoRA through peft: small trained factors in float32 added to frozen weights.

The factors are transferred to engines and saved unmerged. Merging into bfloat16 would lose most of what they have
learned to rounding, so only `training.weights.merging` merges, for exports.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from osworld_pipeline.agent.adapters import (
    ADAPTER,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterCheckpoint,
    Base,
    file_name_of,
    is_factor,
    merge_line,
    parameter_of,
    write_base,
)
from osworld_pipeline.errors import DependencyError, RecipeError, StoreError
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.training.weights.weights_digest import weights_digest

REFERENCE = "reference"
"""peft's name of the parent's adapter, frozen."""
_LAYERS = "model.language_model.layers."


def add_adapters(model: Any, section: LoraSection, *, seed: int) -> None:
    """Adds adapters to the language model's layers and freezes everything else; a new adapter has no effect yet.

    Raises:
        DependencyError: peft is not installed.
        RecipeError: no layer has one of the names, or no name is given.
    """
    layers = [name for name, _ in model.named_modules() if _is_target(name, section)]
    missing = sorted(set(section.target_modules) - {name.rpartition(".")[2] for name in layers})
    if missing or not layers:
        problem = f"no layer is named {' or '.join(missing)}" if missing else "it is empty: name at least one layer"
        raise RecipeError(f"trainer.lora.target_modules: {problem}")
    _inject(model, layers, rank=section.rank, alpha=section.alpha, dropout=section.dropout, name=ADAPTER, seed=seed)
    _train_adapter_alone(model)


def add_saved_adapters(model: Any, adapter: AdapterCheckpoint) -> None:
    """Adds a saved adapter to its layers, with its saved factors. Raises DependencyError, StoreError."""
    _inject(model, adapter.layers, rank=adapter.rank, alpha=adapter.alpha, name=ADAPTER)
    load_factors(model, adapter)
    _train_adapter_alone(model)


def add_reference(model: Any, adapter: AdapterCheckpoint) -> None:
    """Adds the parent's adapter, frozen, next to the trained one; `as_parent` activates it. Raises StoreError."""
    _inject(model, adapter.layers, rank=adapter.rank, alpha=adapter.alpha, name=REFERENCE)
    load_factors(model, adapter, name=REFERENCE)
    _train_adapter_alone(model)


def load_factors(model: Any, adapter: AdapterCheckpoint, *, name: str = ADAPTER) -> None:
    """Loads a saved adapter's factors into the model bit-exactly. If the model is on the meta device, because its
    weights are read later, the factors are placed in host memory. Raises StoreError."""
    try:
        saved = load_file(adapter.weights)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{adapter.weights} cannot be read ({error}): make {adapter.folder} again") from error
    factors = {parameter_of(key, adapter=name): tensor for key, tensor in saved.items()}
    own = {key: param for key, param in model.named_parameters() if f".{name}." in key and ".lora_" in key}
    strange = sorted(own.keys() ^ factors.keys()) or [key for key in own if own[key].shape != factors[key].shape]
    if strange:
        raise StoreError(f"{adapter.weights} is of another model or another adapter ({strange[0]})")
    for key, param in own.items():
        place, _, attribute = key.rpartition(".")
        factor = factors[key].to(device="cpu" if param.is_meta else param.device, dtype=torch.float32)
        setattr(model.get_submodule(place), attribute, torch.nn.Parameter(factor, requires_grad=param.requires_grad))


@contextmanager
def as_parent(model: Any) -> Iterator[None]:
    """The policy at the start of its training, without a second copy of the weights: with the parent's own adapter if
    it had one, else with only the frozen weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    has_reference = any(REFERENCE in layer.lora_A for layer in layers)
    for layer in layers:
        # set_adapter would change which parameters receive gradients.
        layer._active_adapter = [REFERENCE] if has_reference else [ADAPTER]
        layer._disable_adapters = not has_reference
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = [ADAPTER]
            layer._disable_adapters = False


def require_same_settings(adapter: AdapterCheckpoint, section: LoraSection) -> None:
    """
    Raises:
        RecipeError: the recipe describes another adapter than the one that training resumes with.
    """
    has = (adapter.rank, adapter.alpha, sorted(adapter.target_modules))
    wants = (section.rank, section.alpha, sorted(section.target_modules))
    if has != wants:
        raise RecipeError(
            f"trainer.lora has {_described(*wants)}, and the adapter {adapter.folder}, which training continues with, "
            f"has {_described(*has)}: set trainer.lora to that, or merge the adapter "
            f"({merge_line(adapter.folder)}) and train a fresh one on the merged model"
        )


def verified_base(adapter: AdapterCheckpoint) -> Base:
    """
    Raises:
        StoreError: the base is missing, or its weights are not those that the adapter was trained on.
    """
    folder = adapter.base_folder
    digest = weights_digest(folder)
    if adapter.base_digest is not None and digest != adapter.base_digest:
        raise StoreError(
            f"{folder} is not the base of the adapter {adapter.folder}: its weights have the digest {digest[:12]}, and "
            f"the adapter was trained on {adapter.base_digest[:12]}; restore the base"
        )
    return Base(folder=folder, digest=digest)


def save_adapter(
    folder: Path, model: Any, factors: Mapping[str, torch.Tensor], section: LoraSection, base: Base, *, place: Path
) -> None:
    """Writes peft's own format. `place`: the final path of `folder`."""
    folder.mkdir()
    save_file({file_name_of(name): factors[name].contiguous() for name in factors}, folder / WEIGHTS_FILE)
    layers = sorted({name.partition(".lora_")[0] for name in factors})
    config = _config(_shortened(model, layers), rank=section.rank, alpha=section.alpha, dropout=section.dropout)
    config.save_pretrained(folder)
    # peft writes the names in set order, which differs between processes.
    saved = json.loads((folder / CONFIG_FILE).read_text())
    saved["target_modules"] = sorted(saved["target_modules"])
    (folder / CONFIG_FILE).write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
    write_base(folder, base, place=place)


def _is_target(name: str, section: LoraSection) -> bool:
    return name.startswith(_LAYERS) and name.rpartition(".")[2] in section.target_modules


def _inject(
    model: Any, layers: Sequence[str], *, rank: int, alpha: float, name: str, dropout: float = 0.0, seed: int = 0
) -> None:
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise DependencyError(f"trainer.lora needs peft ({error}): install the extra `lora`") from error
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A second adapter, the parent's, is intended.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        torch.manual_seed(seed)
        config = _config(layers, rank=rank, alpha=alpha, dropout=dropout)
        try:
            inject_adapter_in_model(config, model, adapter_name=name)
        except ValueError as error:
            raise StoreError(f"the adapter does not fit the model: {str(error).splitlines()[0]}") from error
    if any(param.is_meta for key, param in model.named_parameters() if is_factor(key)):
        _make_factors(model, rank=rank, name=name, seed=seed)


def _make_factors(model: Any, *, rank: int, name: str, seed: int) -> None:
    """peft moves new factors to the device of their layer; on the meta device they would be lost. They are drawn again
    in host memory, in peft's own order, so that a seed gives the same factors for any number of ranks."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and name in module.lora_A]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            base: Any = layer.get_base_layer()
            layer.lora_A[name] = torch.nn.Linear(base.in_features, rank, bias=False)
            layer.lora_B[name] = torch.nn.Linear(rank, base.out_features, bias=False)
            layer.reset_lora_parameters(name, True)


def _config(layers: Sequence[str], *, rank: int, alpha: float, dropout: float) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] - a float is right, only its annotation is not
        lora_dropout=dropout,
        target_modules=list(layers),
    )


def _shortened(model: Any, layers: Sequence[str]) -> list[str]:
    """The layers in the form that servers expect: the last parts of their names, or full names if those are
    ambiguous."""
    last_parts = {name.rpartition(".")[2] for name in layers}
    named = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if named == set(layers) else layers)


def _train_adapter_alone(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(is_factor(name))
        if param.requires_grad:
            param.data = param.data.float()


def _described(rank: int, alpha: float, target_modules: Sequence[str]) -> str:
    return f"rank {rank}, alpha {alpha:g} and target_modules {', '.join(target_modules)}"
