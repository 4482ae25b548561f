"""Identifies weights by their content: the digest of a checkpoint folder, and the label of a server that holds it.

Every process computes the same digest for a folder, so that engines that share a server load it once.

A checkpoint's digest is read from its manifest.json. Without a manifest the files are hashed in parallel; a writer of
weights that many processes read stores the result next to them (`write_digest`).
"""

import functools
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from osworld_pipeline.agent.adapters import CONFIG_FILE as ADAPTER_CONFIG_FILE
from osworld_pipeline.agent.adapters import FOLDER as ADAPTER_FOLDER
from osworld_pipeline.agent.adapters import AdapterCheckpoint, find_adapter, whole_weights_folder
from osworld_pipeline.errors import EngineError, StoreError
from osworld_pipeline.rollout.engines.safetensors_header import Span, read_header

if TYPE_CHECKING:
    import torch

Consume = Callable[[Iterable[tuple[str, "torch.Tensor"]]], None]
"""Sends tensors by name. It blocks, and raises EngineError once a server has failed."""
MANIFEST_FILE = "manifest.json"
"""The file that training.weights.manifest writes."""
DIGEST_FILE = "weights-digest.json"
CONFIG_FILE = "config.json"
WEIGHTS = "*.safetensors"
VISION = "visual."
"""Part of the name of each tensor of the vision tower."""
CHUNK_BYTES = 64 << 20
NUM_DIGITS = 24
"""Number of digits of a digest in labels."""
LABEL_START = "osworld"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A server's `weight_version`. A label in another format is used as the name of the weights."""

    weights: str
    vision: str = ""
    """Digest of the vision tower; empty if unknown."""
    owner: str = ""
    """The run that loaded them; empty if no engine did."""

    def __str__(self) -> str:
        return ".".join((LABEL_START, self.weights, self.vision, self.owner)) if self.owner else self.weights

    @classmethod
    def parse(cls, text: str) -> "Label":
        match text.split("."):
            case [start, weights, vision, owner] if start == LABEL_START and owner:
                return cls(weights=weights, vision=vision, owner=owner)
        return cls(weights=text)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    name: str
    """Digest of its content; its name on servers."""
    path: Path
    """Folder in peft's format."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightStream:
    """Weights that can be sent any number of times."""

    num_bytes: int
    run: Callable[[Consume], Awaitable[None]]
    """Calls its argument with all tensors, in a thread in which they do not change. Raises TransientError if these
    weights are no longer, or not now, available."""


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """The weights of a trainer after an update, by name instead of by content."""

    name: str
    """Unique over all runs."""
    like: Path
    """A checkpoint folder with tensors of the same names and shapes."""
    vision: str
    """Digest of their vision tower, or a unique name if it is trained; empty if there is none."""
    stream: WeightStream | None = None
    """None in a program that only samples: another one sends them."""
    save: Callable[[], Awaitable[Path]] | None = None
    """Writes them to a folder that this program can read, for a comparison; None as for `stream`. Raises as `run`."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that an engine samples from."""

    digest: str | None
    """Digest of the whole weights; with an adapter those of its base. None until a server has reported its label."""
    policy_version: int
    path: Path | None = None
    """Folder of the whole weights; None for the weights that the servers were started with."""
    adapter: Adapter | None = None
    checkpoint: Path | None = None
    """Folder that was loaded: `path`, or that of the adapter checkpoint over it."""
    trained: TrainedWeights | None = None
    """The weights of a running trainer, which are in no folder."""

    @property
    def source(self) -> Path | WeightStream | None:
        """The place from which a server gets them; None if this program cannot provide them."""
        return self.path or (None if self.trained is None else self.trained.stream)

    @property
    def name(self) -> str | None:
        return self.digest if self.adapter is None else f"{self.digest}+{self.adapter.name}"


def read_weights(folder: Path, *, policy_version: int) -> Weights:
    """The weights of a checkpoint folder. Reads all of its files once if no digest is stored.

    Raises:
        EngineError: there are no weights, or the base of its adapter is missing; names the folder.
    """
    try:
        adapter = find_adapter(folder)
        base = folder if adapter is None else adapter.base_folder
    except StoreError as error:
        raise EngineError(f"cannot load the weights at {folder}: {error}") from error
    return Weights(
        digest=weights_digest(base),
        policy_version=policy_version,
        path=base,
        adapter=None if adapter is None else Adapter(name=_adapter_name(folder, adapter), path=adapter.folder),
        checkpoint=folder,
    )


def weights_digest(folder: Path, *, manifest_folder: Path | None = None) -> str:
    """Digest of the safetensors files. `manifest_folder`: of the manifest that lists them; None for the same folder.

    Raises:
        EngineError: there are no weights, or they cannot be read.
    """
    files = _weight_files(folder)
    known = _from_digest_file(folder, files) or _from_manifest(manifest_folder or folder, files)
    return (known or _hashed(files))[:NUM_DIGITS]


def weight_bytes(folder: Path) -> int:
    """Size of the safetensors files."""
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS))


def vision_digest(folder: Path) -> str:
    """Digest of the vision tower: its tensors by name, type and bytes. Empty if there is none, or no such folder.

    Raises:
        EngineError: its files cannot be read.
    """
    spans = [(path, span) for path in sorted(folder.glob(WEIGHTS)) for span in read_header(path)]
    towers = sorted(
        ((span.name.partition(VISION)[2], path, span) for path, span in spans if VISION in span.name),
        key=lambda tower: tower[0],
    )
    if not towers:
        return ""
    try:
        with _threads() as threads:
            digests = list(threads.map(lambda tower: _digest_span(tower[1], tower[2]), towers))
    except OSError as error:
        raise EngineError(f"the weights at {folder} cannot be read: {error}") from error
    lines = [f"{name} {span.dtype} {digest}\n" for (name, _, span), digest in zip(towers, digests, strict=True)]
    return _digest_lines(lines)[:NUM_DIGITS]


def write_digest(folder: Path) -> None:
    """Stores the digest next to weights without a manifest, so that readers need not hash them.

    Raises:
        EngineError: the weights cannot be read, or the file cannot be written.
    """
    for place in (folder, folder / ADAPTER_FOLDER):
        if not any(place.glob(WEIGHTS)):
            continue
        files = _weight_files(place)
        document = {"digest": _hashed(files), "files": {path.name: path.stat().st_size for path in files}}
        temp = place / f".{DIGEST_FILE}-{uuid4().hex}"
        try:
            temp.write_text(json.dumps(document))
            os.replace(temp, place / DIGEST_FILE)
        except OSError as error:
            raise EngineError(f"the digest of the weights at {place} cannot be written: {error}") from error


def vocab_size_of(folder: Path) -> int:
    """Rows of the model's embedding, from config.json; from the base's if an adapter folder has none.

    Raises:
        EngineError: the file is missing, or does not contain it.
    """
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():
            path = whole_weights_folder(folder) / CONFIG_FILE
        config = json.loads(path.read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        raise EngineError(f"{path} has no vocabulary size ({error})") from error


def _adapter_name(folder: Path, adapter: AdapterCheckpoint) -> str:
    """Derived from its factors and its configuration."""
    path = adapter.folder / ADAPTER_CONFIG_FILE
    try:
        config = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    factors = weights_digest(adapter.folder, manifest_folder=folder)
    return f"adapter-{_digest_lines([factors, config])[:NUM_DIGITS]}"


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise EngineError(f"no weights (*.safetensors) at {folder}")
    return files


def _from_digest_file(folder: Path, files: list[Path]) -> str | None:
    try:
        document = json.loads((folder / DIGEST_FILE).read_text())
        sizes = {path.name: path.stat().st_size for path in files}
        return str(document["digest"]) if document["files"] == sizes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_manifest(folder: Path, files: list[Path]) -> str | None:
    """The same as `weights_digest` in checkpoint.json: the digest of a single file, or else of all names and
    digests."""
    try:
        entries = json.loads((folder / MANIFEST_FILE).read_text())["files"]
        digests: list[str] = []
        for path in files:
            entry = entries[str(path.relative_to(folder))]
            if entry["num_bytes"] != path.stat().st_size:
                return None
            digests.append(str(entry["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(digests) == 1:
        return digests[0]
    return _digest_lines(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))


def _hashed(files: list[Path]) -> str:
    """Digest of names and content, chunk by chunk; unchanged large files are read once."""
    try:
        stats = [(path, path.stat()) for path in files]
        # A small file may be rewritten within the resolution of its modification time.
        is_large = sum(stat.st_size for _, stat in stats) >= CHUNK_BYTES
        digest = _hash_files if is_large else _hash_files.__wrapped__
        return digest(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))
    except OSError as error:
        raise EngineError(f"the weights at {files[0].parent} cannot be read: {error}") from error


@functools.lru_cache(maxsize=8)
def _hash_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    """`files`: with their sizes and modification times."""
    chunks = [
        (path, Span(name=path.name, dtype="", shape=(), start=start, end=min(start + CHUNK_BYTES, size)))
        for path, size, _ in files
        for start in range(0, size, CHUNK_BYTES)
    ]
    with _threads() as threads:
        digests = list(threads.map(lambda chunk: _digest_span(*chunk), chunks))
    return _digest_lines(f"{path.name} {digest}\n" for (path, _), digest in zip(chunks, digests, strict=True))


def _threads() -> ThreadPoolExecutor:
    # hashlib lets other threads run while it hashes.
    return ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))


def _digest_span(path: Path, span: Span) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        opened.seek(span.start)
        left = span.end - span.start
        while left > 0:
            data = opened.read(min(left, 1 << 20))
            if not data:
                raise OSError(f"{path} is shorter than its header states")
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


def _digest_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()
