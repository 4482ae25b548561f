"""Checkpoints made elsewhere: a folder, a model of the hub at one commit, or an OpenAI-compatible endpoint. Each gets a
card and a table row; nothing is copied. A folder is verified on each use to be unchanged. It may hold a LoRA adapter in
peft's format if the base that it names is a folder or in the hub's cache."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.adapters import find_adapter, whole_weights_folder
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.digest import digest_bytes, digest_json
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError, StoreError
from osworld_pipeline.runs.checkpoints.endpoints import Endpoint, is_address
from osworld_pipeline.runs.checkpoints.ids import CARD, DIGEST_LENGTH, checkpoint_card, read_checkpoint
from osworld_pipeline.runs.checkpoints.model_card import CARD as MODEL_CARD
from osworld_pipeline.runs.checkpoints.model_card import card_licence
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints, register_checkpoint
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest

HUB = "hub:"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
MODEL_TYPE = "qwen3_vl"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", MODEL_CARD)
"""Files that are downloaded from a repository, which may hold the weights in other formats, too."""

FetchModel = Callable[[str, str | None], Path]
"""Returns the folder of a hub model at a revision (None: its main branch), named after the commit."""


def add_checkpoint(state: StateDir, source: str, *, fetch: FetchModel | None = None) -> Checkpoint:
    """The checkpoint that `source` names: a folder in Hugging Face format, `hub:OWNER/NAME[@REVISION]`, or an endpoint
    `http(s)://host/v1#model`. Adding the same weights again changes only the recorded location and licence.
    A checkpoint folder of this state is registered as it is. `fetch`: None downloads from the hub.

    Raises:
        StoreError: the source is none of these, has no weights, or holds a model that cannot be loaded here.
        DependencyError: the hub does not provide it.
        TableError: the table cannot be written.
    """
    if is_address(source):
        checkpoint = _of_endpoint(Endpoint.parse(source))
    elif source.startswith(HUB):
        checkpoint = _of_folder((fetch or fetch_model)(*_parse_hub(source)), state)
    else:
        folder = Path(source).expanduser().resolve()
        if folder.parent == state.checkpoints.resolve() and (folder / CARD).is_file():
            return register_checkpoint(state, folder.name)
        checkpoint = _of_folder(folder, state)
    known = read_checkpoint(state, checkpoint.checkpoint_id)
    if known is not None:
        checkpoint = replace(checkpoint, saved_at=known.saved_at)
    card = json.dumps(checkpoint_card(checkpoint), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_file(state.checkpoints / checkpoint.checkpoint_id / CARD, card.encode())
    upsert_checkpoint(state, checkpoint)
    return checkpoint


def find_or_add(state: StateDir, named: str) -> Checkpoint:
    """The checkpoint that `named` means: the id of an existing checkpoint, or else a source, which is added.

    Raises:
        TableError: it is neither an id nor a source.
        StoreError, DependencyError: as add_checkpoint.
    """
    is_known = any(one.checkpoint_id == named for one in all_checkpoints(state))
    is_source = is_address(named) or named.startswith(HUB) or Path(named).expanduser().is_dir()
    return register_checkpoint(state, named) if is_known or not is_source else add_checkpoint(state, named)


def require_unchanged(checkpoint_id: str, folder: Path) -> None:
    """
    Raises:
        StoreError: the folder of an external checkpoint is missing or has changed since it was added.
    """
    if not folder.is_dir():
        raise StoreError(
            f"{checkpoint_id} is missing: there is no folder {folder}; restore it, or add it from its new location "
            "(the command checkpoint add)"
        )
    if _identify(folder)[0] != checkpoint_id:
        raise StoreError(
            f"{folder} has changed since it was added as {checkpoint_id} (its weights or its {CONFIG}): restore the "
            "old files, or add it as a new checkpoint "
            f"({shell_line(PIPELINE, 'checkpoint', 'add', folder)})"
        )


def fetch_model(repo_id: str, revision: str | None) -> Path:
    """Raises DependencyError if the hub does not provide it."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(HUB_FILES))).resolve()
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DependencyError(
            f"the hub did not provide {repo_id} at revision {revision or 'main'} ({str(error).splitlines()[0]}): "
            "download it elsewhere and add its folder"
        ) from error


def _parse_hub(source: str) -> tuple[str, str | None]:
    repo_id, _, revision = source.removeprefix(HUB).partition("@")
    owner, _, name = repo_id.partition("/")
    if not owner or not name or "/" in name:
        raise StoreError(f"cannot read '{source}': a model of the hub is written hub:OWNER/NAME[@REVISION]")
    return repo_id, revision or None


def _of_endpoint(endpoint: Endpoint) -> Checkpoint:
    digest = digest_json({"url": endpoint.url, "model": endpoint.model})
    return _external(digest, path=str(endpoint), weights_digest="")


def _of_folder(folder: Path, state: StateDir) -> Checkpoint:
    """The processor of a folder that was added before is not loaded again, because that takes seconds."""
    _require_folder(folder)
    adapter = find_adapter(folder)
    if adapter is not None:
        from osworld_pipeline.training.weights.lora import verified_base

        verified_base(adapter)
    _require_loadable(folder if adapter is None else adapter.base_folder)
    checkpoint_id, weights = _identify(folder)
    known = read_checkpoint(state, checkpoint_id)
    if known is None or known.path != str(folder):
        _require_processor(folder)
    digest = checkpoint_id.removeprefix(f"{Stage.EXTERNAL}-")
    return _external(digest, path=str(folder), weights_digest=weights, licence=card_licence(folder))


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise StoreError(
            f"there is no folder {folder}: a checkpoint from elsewhere is a folder, hub:OWNER/NAME[@REVISION] or "
            "http(s)://host/v1#model"
        )


def _require_loadable(folder: Path) -> None:
    try:
        config: Any = json.loads((folder / CONFIG).read_text())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{folder} is not a model in Hugging Face format: it has no {CONFIG} that names its model_type"
        ) from error
    if kind != MODEL_TYPE:
        raise StoreError(
            f"{folder} holds a model of type {kind}, and only {MODEL_TYPE} can be loaded here: have a server "
            "serve it and add its endpoint (http://host/v1#model)"
        )
    # Without this file an empty tokenizer would be created without a warning.
    if not (folder / TOKENIZER).is_file():
        raise StoreError(f"{folder} has no {TOKENIZER}: save the model's processor there, too")


def _require_processor(folder: Path) -> None:
    from huggingface_hub.errors import StrictDataclassError

    try:
        load_processor(folder)
    except StrictDataclassError as error:
        raise StoreError(
            f"{folder / CONFIG} has a value that is not valid for {MODEL_TYPE}: {str(error).splitlines()[-1]}"
        ) from error


def _identify(folder: Path) -> tuple[str, str]:
    """Its id, and the digest of its weights. Raises StoreError if the weights cannot be read."""
    try:
        weights = weights_digest(folder)
        config = digest_bytes((whole_weights_folder(folder) / CONFIG).read_bytes())
    except OSError as error:
        raise StoreError(f"the weights in {folder} cannot be read: {error}") from error
    digest = digest_json({"weights": weights, "config": config})
    return f"{Stage.EXTERNAL}-{digest[:DIGEST_LENGTH]}", weights


def _external(digest: str, *, path: str, weights_digest: str, licence: str | None = None) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{Stage.EXTERNAL}-{digest[:DIGEST_LENGTH]}",
        stage=Stage.EXTERNAL,
        parent_id=None,
        path=path,
        num_updates=0,
        recipe_digest="",
        data_digest="",
        weights_digest=weights_digest,
        licence=licence,
        saved_at=round(time.time(), 3),
    )
