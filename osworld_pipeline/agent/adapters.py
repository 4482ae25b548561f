"""Adapter checkpoints: low-rank factors in peft's format, and a reference to the base checkpoint with the frozen
weights.

adapter/adapter_config.json, adapter_model.safetensors    peft's own
adapter/base.json                                         the base: its folder, and the digest of its weights
config.json, processor files                              the base's

A folder written by peft itself (adapter_config.json next to the factors, no base.json) is read, too; its configuration
names the base. A folder with whole weights is not an adapter checkpoint, even if it contains adapter/.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.errors import StoreError

FOLDER = "adapter"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "base.json"
WHOLE_WEIGHTS = "model*.safetensors"
ADAPTER = "default"
"""peft's name of the adapter that is trained and sampled."""
_PREFIX = "base_model.model."
_FACTORS = (".lora_A", ".lora_B")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": (None,),
}
"""Values in peft's configuration under which an adapter is exactly alpha / rank times its factors' product."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The frozen weights under an adapter."""

    folder: Path
    digest: str
    """The digest of training.checkpoint.weights_digest."""


@dataclass(frozen=True, kw_only=True)
class AdapterCheckpoint:
    folder: Path
    """Folder of the factors and their configuration."""
    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Names of the modules that have factors, sorted."""
    base_digest: str | None
    """None if it is not recorded, as in peft's own folders."""

    @property
    def target_modules(self) -> frozenset[str]:
        """Last parts of the layers' names."""
        return frozenset(name.rpartition(".")[2] for name in self.layers)

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_FILE

    @property
    def base_folder(self) -> Path:
        """The folder of the base; its weights are not verified. Raises StoreError if it is missing."""
        if (self.folder / BASE_FILE).is_file():
            return _recorded_base(self.folder)
        return _named_base(self.folder)


def find_adapter(folder: Path) -> AdapterCheckpoint | None:
    """The adapter of a checkpoint folder; None if the folder holds whole weights or no adapter.

    Raises:
        StoreError: it cannot be read, or is more than low-rank factors.
    """
    place = next((place for place in (folder / FOLDER, folder) if (place / CONFIG_FILE).is_file()), None)
    if place is None or any(folder.glob(WHOLE_WEIGHTS)):
        return None
    config = _read_json(place / CONFIG_FILE)
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            raise StoreError(
                f"{place / CONFIG_FILE} has {name} = {config.get(name)!r}: only plain LoRA can be loaded here; merge "
                "it with peft and use the merged model"
            )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{place / CONFIG_FILE} has no usable r and lora_alpha") from error
    digest = _read_json(place / BASE_FILE).get("base_digest") if (place / BASE_FILE).is_file() else None
    return AdapterCheckpoint(
        folder=place, rank=rank, alpha=alpha, layers=_layers(place / WEIGHTS_FILE), base_digest=digest
    )


def whole_weights_folder(folder: Path) -> Path:
    """The folder with the whole weights: the folder itself, or the base of its adapter. Raises StoreError."""
    adapter = find_adapter(folder)
    return folder if adapter is None else adapter.base_folder


def write_base(adapter: Path, base: Base, *, place: Path) -> None:
    """Writes base.json. `place`: the final path of `adapter`. The path to the base is relative to `place`, so that a
    state folder with both can be moved; for a base elsewhere an absolute path is added."""
    folder, place = base.folder.resolve(), place.resolve()
    document = {"base_folder": os.path.relpath(folder, place), "base_digest": base.digest}
    if folder.parent not in place.parents:
        document["absolute_base_folder"] = str(folder)
    (adapter / BASE_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def is_factor(name: str) -> bool:
    """Whether a model's parameter is a factor of the adapter that is trained and sampled."""
    return name.endswith(tuple(f"{kind}.{ADAPTER}.weight" for kind in _FACTORS))


def file_name_of(parameter: str) -> str:
    """The name in adapter_model.safetensors of a model's factor."""
    return _PREFIX + parameter.removesuffix(f".{ADAPTER}.weight") + ".weight"


def parameter_of(file_name: str, *, adapter: str = ADAPTER) -> str:
    """The model's name of a factor in adapter_model.safetensors."""
    return f"{file_name.removeprefix(_PREFIX).removesuffix('.weight')}.{adapter}.weight"


def _layers(path: Path) -> tuple[str, ...]:
    """Names in the header of a safetensors file: its length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        names = [name.removeprefix(_PREFIX).removesuffix(".weight") for name in header if name != "__metadata__"]
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_way_out(path.parent)}") from error
    strange = [name for name in names if not name.endswith(_FACTORS)]
    if strange or not names:
        what = f"{strange[0]}, which is not a low-rank factor" if strange else "nothing"
        raise StoreError(f"{path} holds {what}: {_way_out(path.parent)}")
    return tuple(sorted({name.rpartition(".")[0] for name in names}))


def _recorded_base(adapter: Path) -> Path:
    document = _read_json(adapter / BASE_FILE)
    try:
        folder = (adapter.resolve() / document["base_folder"]).resolve()
    except (KeyError, TypeError) as error:
        raise StoreError(f"{adapter / BASE_FILE} names no base_folder: {_way_out(adapter)}") from error
    elsewhere = document.get("absolute_base_folder")
    if not folder.is_dir() and elsewhere:
        folder = Path(elsewhere)
    if not folder.is_dir():
        raise StoreError(
            f"the base checkpoint of the adapter {adapter} is missing: there is no folder {folder}; restore "
            f"the base, or write its new location to {adapter / BASE_FILE}"
        )
    return folder


def _named_base(adapter: Path) -> Path:
    """The base that peft's format names: a folder, or a model of the hub, which must be in the hub's cache."""
    config = _read_json(adapter / CONFIG_FILE)
    name = config.get("base_model_name_or_path")
    if not name:
        raise StoreError(
            f"the base model of the adapter {adapter} is not recorded: set base_model_name_or_path in "
            f"{adapter / CONFIG_FILE} to the folder of its base"
        )
    for folder in (adapter.resolve() / name, Path(name)):
        if folder.is_dir():
            return folder.resolve()
    if Path(name).is_absolute():
        raise StoreError(
            f"the base checkpoint of the adapter {adapter} is missing: there is no folder {name}; restore "
            f"the base, or set base_model_name_or_path in {adapter / CONFIG_FILE} to its new location"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=config.get("revision"), local_files_only=True)).resolve()
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the base of the adapter {adapter} is {name}, which is neither a folder nor in the hub's cache: add it "
            f"first ({shell_line(PIPELINE, 'checkpoint', 'add', f'hub:{name}')}), or set base_model_name_or_path in "
            f"{adapter / CONFIG_FILE} to its folder"
        ) from error


def merge_line(checkpoint: Path) -> str:
    """The command that merges an adapter checkpoint into a model with whole weights, in a new folder next to it."""
    folder = checkpoint.parent if checkpoint.name == FOLDER else checkpoint
    return shell_line(PIPELINE, "export", "merged", folder, folder.with_name(f"{folder.name}-merged"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_way_out(path.parent)}") from error
    if not isinstance(document, dict):
        raise StoreError(f"{path} does not contain a JSON object: {_way_out(path.parent)}")
    return document


def _way_out(adapter: Path) -> str:
    folder = adapter.parent if adapter.name == FOLDER else adapter
    return f"remove {folder} and make it again"
