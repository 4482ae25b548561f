"""Checkpoints on disk: Hugging Face folders with optimiser and trainer state beside the weights, whole or absent.

checkpoints/<checkpoint_id>/                      finished
checkpoints/<checkpoint_id>.partial/update-0100/  to resume from: 100 updates are behind it
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError

OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
NUM_PARTIALS_KEPT = 2
FULL_DISK_BYTES = 4 << 20
_PARTIAL = re.compile(r"^update-(\d+)$")
_WRITING = ".writing-"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a resumed run and a curious reader need beside weights and optimiser."""

    checkpoint_id: str
    parent_id: str | None
    num_updates: int
    """Updates behind these weights."""
    recipe: Mapping[str, Any]
    """Resolved, as the run used it."""
    data_digest: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last update."""
    extra: Mapping[str, Any] = field(default_factory=dict)


Documents = Callable[[Path], Mapping[str, Any]]
"""JSON files to lay beside the weights, by name; gets the folder with the weights already in it."""


def final_dir(state: StateDir, checkpoint_id: str) -> Path:
    return state.checkpoints / checkpoint_id


def partials_dir(state: StateDir, checkpoint_id: str) -> Path:
    return state.checkpoints / f"{checkpoint_id}.partial"


def save_checkpoint(
    folder: Path,
    *,
    model: Any,
    processor: Any,
    optimizer: Any | None,
    trainer_state: TrainerState,
    documents: Documents | None = None,
) -> None:
    """Writes a checkpoint to `folder`, replacing what is there. `optimizer` has a state_dict.

    Raises:
        StoreError: the file system refused; nothing half-written is left.
    """

    def fill(temp: Path) -> None:
        model.save_pretrained(temp)
        processor.save_pretrained(temp)
        if optimizer is not None:
            torch.save({"optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}, temp / OPTIMIZER_FILE)
        write_json(temp / STATE_FILE, asdict(trainer_state))
        for name, document in (documents(temp) if documents else {}).items():
            write_json(temp / name, document)

    write_folder(folder, fill)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """A folder that is whole or absent: filled beside its place, synced, renamed.

    Raises:
        StoreError: the file system refused; names the folder and the way out.
    """
    temp = folder.parent / f"{_WRITING}{folder.name}-{uuid4().hex}"
    try:
        temp.mkdir(parents=True)
        fill(temp)
        for path in sorted(temp.rglob("*")):
            _sync(path)
        _sync(temp)
        if folder.exists():
            # A folder cannot be renamed over a full one; a kill between the two lines leaves it to be made again.
            os.replace(folder, temp.with_name(f"{temp.name}-old"))
        os.replace(temp, folder)
        _sync(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _store_error(folder, error) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(temp.with_name(f"{temp.name}-old"), ignore_errors=True)


def _store_error(folder: Path, error: Exception) -> StoreError:
    # safetensors and torch.save report a full disk as errors of their own, the latter without naming the cause.
    is_full = (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "No space left" in str(error)
        or (isinstance(error, RuntimeError) and shutil.disk_usage(folder.parent).free < FULL_DISK_BYTES)
    )
    if is_full:
        return StoreError(f"no disk space left to write {folder}: free some space there and run again; it will resume")
    return StoreError(f"cannot write the checkpoint {folder}: {str(error).splitlines()[0]}")


def save_partial(state: StateDir, trainer_state: TrainerState, *, model: Any, processor: Any, optimizer: Any) -> Path:
    """A checkpoint to resume from; only the last two are kept. Raises StoreError."""
    parent = partials_dir(state, trainer_state.checkpoint_id)
    folder = parent / f"update-{trainer_state.num_updates:04d}"
    save_checkpoint(folder, model=model, processor=processor, optimizer=optimizer, trainer_state=trainer_state)
    for _, old in _partials(parent)[:-NUM_PARTIALS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def save_final(
    state: StateDir,
    trainer_state: TrainerState,
    *,
    model: Any,
    processor: Any,
    optimizer: Any | None,
    documents: Documents | None = None,
) -> Path:
    """The stage's result; its partial checkpoints go. Raises StoreError."""
    folder = final_dir(state, trainer_state.checkpoint_id)
    save_checkpoint(
        folder,
        model=model,
        processor=processor,
        optimizer=optimizer,
        trainer_state=trainer_state,
        documents=documents,
    )
    shutil.rmtree(partials_dir(state, trainer_state.checkpoint_id), ignore_errors=True)
    return folder


def latest_complete(state: StateDir, checkpoint_id: str) -> Path | None:
    """The newest checkpoint to resume from; None where there is none."""
    found = _partials(partials_dir(state, checkpoint_id))
    return found[-1][1] if found else None


def _partials(parent: Path) -> list[tuple[int, Path]]:
    if not parent.is_dir():
        return []
    matches = [(_PARTIAL.match(path.name), path) for path in parent.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match and (path / STATE_FILE).is_file())


def remove_stale_writes(state: StateDir, checkpoint_id: str) -> int:
    """Removes what a killed trainer of this stage left half-written. Call it behind the stage's fence."""
    stale = [
        *state.checkpoints.glob(f"{_WRITING}{checkpoint_id}-*"),
        *partials_dir(state, checkpoint_id).glob(f"{_WRITING}*"),
    ]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return len(stale)


def read_trainer_state(folder: Path) -> TrainerState:
    """Raises StoreError where the folder's trainer_state.json is missing or damaged."""
    path = folder / STATE_FILE
    try:
        return TrainerState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): remove {folder} and run the stage again") from error


def load_optimizer(folder: Path, optimizer: Any) -> None:
    """Optimiser and random state of a checkpoint, as they were. Raises StoreError."""
    path = folder / OPTIMIZER_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(f"{path} cannot be read ({reason}): remove {folder} and run the stage again") from error
    torch.set_rng_state(saved["torch_rng"])


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) of model.safetensors; of the shards' names and digests where there are several.

    Raises:
        StoreError: no safetensors weights there.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise StoreError(f"no model.safetensors in {folder}: this is no checkpoint in Hugging Face format")
    digests = {}
    for path in files:
        with path.open("rb") as handle:
            digests[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
