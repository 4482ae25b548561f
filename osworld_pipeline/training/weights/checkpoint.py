"""Checkpoints on disk: Hugging Face folders with optimiser and trainer state next to the weights, written atomically.

checkpoints/<checkpoint_id>/                      finished
checkpoints/<checkpoint_id>-u0100/                a milestone: the weights after 100 updates, kept to be evaluated
checkpoints/<checkpoint_id>.partial/update-0100/  to resume from: the state after 100 updates
    model*.safetensors, config and processor files    plain Hugging Face format
    adapter/                                          under LoRA, instead of the weights (agent.adapters)
    optimizer/                                        torch's distributed checkpoint, of any number of ranks
    trainer_state.json, manifest.json
"""

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from osworld_pipeline.agent.adapters import BASE_FILE, Base, find_adapter, write_base
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.weights.manifest import MANIFEST_FILE, build_manifest
from osworld_pipeline.training.weights.weights_digest import weights_digest

OPTIMIZER_FOLDER = "optimizer"
STATE_FILE = "trainer_state.json"
FULL_DISK_BYTES = 4 << 20
_PARTIAL = re.compile(r"^update-(\d+)$")
_WRITING = ".writing-"
# A single process is intended here. The filter is set once for the process, not by the thread that saves.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_REPLACED = re.compile(r"^\.writing-(?P<name>.+)-[0-9a-f]{32}-old$")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Trainer state besides weights and optimiser, for resumed runs and for readers."""

    checkpoint_id: str
    parent_id: str | None
    num_updates: int
    """Number of updates in these weights."""
    recipe: Mapping[str, Any]
    """Resolved, as the run used it."""
    data_digest: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last update."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further state that the caller needs to resume."""
    code_version: str = ""
    """Version of the program that trained; empty if unknown."""


def final_dir(state: StateDir, checkpoint_id: str) -> Path:
    return state.checkpoints / checkpoint_id


def partials_dir(state: StateDir, checkpoint_id: str) -> Path:
    return state.checkpoints / f"{checkpoint_id}.partial"


Documents = Callable[[Path], Mapping[str, Any]]
"""Returns JSON files to store next to the weights, by name; called with the folder once it has the weights."""


class Saves(Protocol):
    """The part of a trainer that saves checkpoints."""

    def save(
        self, folder: Path, documents: Mapping[str, Any] | Documents, *, then: Callable[[Path], object] | None = None
    ) -> None:
        """Starts to write the folder atomically; `then` is called with it when it is complete. Raises StoreError, also
        for an error of the previous save."""
        ...

    def wait_saved(self) -> None:
        """Waits until the folder is complete. Raises StoreError."""
        ...


def write_documents(folder: Path, documents: Mapping[str, Any] | Documents) -> None:
    """Writes the JSON files of a checkpoint whose weights are in `folder`, and its manifest last."""
    contents = documents if isinstance(documents, Mapping) else documents(folder)
    for name, document in contents.items():
        write_json(folder / name, document)
    write_json(folder / MANIFEST_FILE, build_manifest(folder, contents.get(STATE_FILE, {})))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """`writing_folder` with a function that fills it. Raises StoreError."""
    with writing_folder(folder) as temp:
        fill(temp)


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """An atomically written folder: filled next to its final place, synced, renamed.

    Raises:
        StoreError: the folder could not be written; names it, and for a full disk what to do.
    """
    temp = folder.parent / f"{_WRITING}{folder.name}-{uuid4().hex}"
    try:
        temp.mkdir(parents=True)
        yield temp
        for path in sorted(temp.rglob("*")):
            _sync(path)
        _sync(temp)
        if folder.exists():
            # A folder cannot be renamed over a non-empty one. After a kill between the two renames, remove_stale_writes
            # restores the old folder.
            os.replace(folder, temp.with_name(f"{temp.name}-old"))
        os.replace(temp, folder)
        _sync(folder.parent)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise _store_error(folder, error) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(temp.with_name(f"{temp.name}-old"), ignore_errors=True)


def _store_error(folder: Path, error: BaseException) -> StoreError:
    # safetensors and torch.save report a full disk with their own errors, the latter without the cause.
    cause = _cause(error)
    is_full = (
        getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "No space left" in str(error)
        or (isinstance(cause, RuntimeError) and shutil.disk_usage(folder.parent).free < FULL_DISK_BYTES)
    )
    if is_full:
        return StoreError(f"no disk space left to write {folder}: free some space there and run again; it will resume")
    return StoreError(f"cannot write the checkpoint {folder}: {_reason(error)}")


def _cause(error: BaseException) -> BaseException:
    """Torch's distributed checkpoint wraps the errors of the ranks."""
    if isinstance(error, CheckpointException):
        return next((failure for failure, _ in error.failures.values()), error)
    return error


def _reason(error: BaseException) -> str:
    """One line."""
    error = _cause(error)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def save_partial(
    state: StateDir,
    trainer: Saves,
    trainer_state: TrainerState,
    *,
    keep_last: int = 2,
    then: Callable[[Path], object] | None = None,
) -> None:
    """Starts to write a checkpoint to resume from. When it is complete, the newest `keep_last` are kept, and `then` is
    called with its folder. Raises StoreError."""
    parent = partials_dir(state, trainer_state.checkpoint_id)

    def finish(folder: Path) -> None:
        for _, old in _partials(parent)[:-keep_last]:
            shutil.rmtree(old, ignore_errors=True)
        if then is not None:
            then(folder)

    folder = parent / f"update-{trainer_state.num_updates:04d}"
    trainer.save(folder, {STATE_FILE: asdict(trainer_state)}, then=finish)


def keep_milestone(state: StateDir, partial: Path, name: str, documents: Documents) -> Path:
    """Keeps the weights of a partial checkpoint, without the optimiser, as the finished checkpoint `name` (a
    `milestone_id`), which outlives the stage. The files of the partial are hard-linked; manifest, `documents` and an
    adapter's base.json are written anew. An existing folder is kept as it is. Raises StoreError."""
    folder = state.checkpoints / name
    trainer_state = {**asdict(read_trainer_state(partial)), "checkpoint_id": name}

    adapter = find_adapter(partial)

    def fill(temp: Path) -> None:
        _link_files(partial, temp, without=MANIFEST_FILE)
        if adapter is not None:
            place = Path(adapter.folder.name)
            _link_files(adapter.folder, temp / place, without=BASE_FILE)
            base = Base(folder=adapter.base_folder, digest=adapter.base_digest or weights_digest(adapter.base_folder))
            write_base(temp / place, base, place=folder / place)  # the relative path differs from here
        for file, document in documents(temp).items():
            write_json(temp / file, document)
        write_json(temp / MANIFEST_FILE, build_manifest(temp, trainer_state))

    if not folder.exists():
        write_folder(folder, fill)
    return folder


def _link_files(source: Path, target: Path, *, without: str) -> None:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name != without:
            os.link(path, target / path.name)


def save_final(
    state: StateDir, trainer: Saves, trainer_state: TrainerState, *, documents: Documents | None = None
) -> Path:
    """Writes the stage's result, complete on return, and removes its partial checkpoints. Raises StoreError."""
    folder = final_dir(state, trainer_state.checkpoint_id)

    def all_documents(temp: Path) -> Mapping[str, Any]:
        return {STATE_FILE: asdict(trainer_state), **(documents(temp) if documents else {})}

    trainer.save(folder, all_documents)
    trainer.wait_saved()
    shutil.rmtree(partials_dir(state, trainer_state.checkpoint_id), ignore_errors=True)
    return folder


def latest_complete(state: StateDir, checkpoint_id: str) -> Path | None:
    """The newest checkpoint to resume from; None if there is none."""
    found = _partials(partials_dir(state, checkpoint_id))
    return found[-1][1] if found else None


def _partials(parent: Path) -> list[tuple[int, Path]]:
    if not parent.is_dir():
        return []
    matches = [(_PARTIAL.match(path.name), path) for path in parent.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match and (path / STATE_FILE).is_file())


def remove_stale_writes(state: StateDir, checkpoint_id: str) -> int:
    """Removes incomplete files of a killed trainer of this stage, and restores a folder that it was replacing. Call it
    while holding the stage lock."""
    stale = [
        *state.checkpoints.glob(f"{_WRITING}{checkpoint_id}-*"),
        *partials_dir(state, checkpoint_id).glob(f"{_WRITING}*"),
    ]
    for path in stale:
        replaced = _REPLACED.match(path.name)
        if replaced and not (place := path.with_name(replaced["name"])).exists():
            os.replace(path, place)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return len(stale)


def read_trainer_state(folder: Path) -> TrainerState:
    """Raises StoreError if the folder's trainer_state.json is missing or damaged."""
    path = folder / STATE_FILE
    try:
        return TrainerState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): remove {folder} and run the stage again") from error


def save_optimizer(folder: Path, state: dict[str, torch.Tensor], group: Any = None) -> None:
    """Saves every rank's shards of the optimiser's tensors; all ranks call it with the same folder. `group`: a separate
    process group, if other collectives run concurrently."""
    save_distributed(state, checkpoint_id=folder / OPTIMIZER_FOLDER, process_group=group)


def load_optimizer(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Reads a checkpoint's optimiser into these tensors, for any number of ranks that wrote it. Raises StoreError."""
    path = folder / OPTIMIZER_FOLDER
    try:
        load_distributed(state, checkpoint_id=path)
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise StoreError(
            f"{path} cannot be read ({_reason(error)}): remove {folder} and run the stage again"
        ) from error


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
