"""The manifest of a state on an object store, and a state folder's copy of it from the last push or pull."""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.version import newer_format
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket
from osworld_pipeline.object_store.note import FOLDER
from osworld_pipeline.store.pack_files import SUFFIX as PACK_SUFFIX

KEY = "remote.json"
BASE = "base.json"
PENDING = "pending.json"
"""The manifest that a push is about to write."""
FORMAT = 3
"""1 had no packs of images, 2 no collections."""
READ_SINCE = {1: "0.1.0", 2: "0.1.0", 3: "0.1.0"}
"""The first version of this program that reads each format."""
_PATH = re.compile(r"((trajectories|tables|suites|checkpoints|blobs/packs)(/[A-Za-z0-9_][^/\\\0]*)+|osworld\.duckdb)")


def is_pack(path: str) -> bool:
    """Whether it is a pack of images; its index is an ordinary file."""
    return path.startswith("blobs/") and path.endswith(PACK_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    sha256: str
    num_bytes: int

    def key(self, path: str) -> str:
        """The key of the object for a file with this path: packs have their names, other files the hash of their
        content."""
        return path if is_pack(path) else f"objects/{self.sha256[:2]}/{self.sha256}"


@dataclass(frozen=True, kw_only=True)
class RemoteManifest:
    state_id: str
    """Id of the state, from its first push on."""
    generation: int
    """Increased by each push."""
    files: Mapping[str, RemoteFile]
    """Files by their path in the state folder."""
    compaction: int = 0
    """The generation of the parts' own manifest."""
    compacted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The compacted files of that manifest, by head table."""
    retired_objects: Mapping[str, float] = field(default_factory=dict)
    """Objects that no path names any longer, with the Unix time of the push that dropped them."""
    collection: int = 0
    """Increased by each garbage collection. A journal of uploaded images is valid for one number only."""
    closed_until: float = 0.0
    """Unix time until which a garbage collection removes objects: no push may start or end before."""

    @property
    def journal(self) -> str:
        """Name of the journal of images uploaded for this state since its last garbage collection."""
        return f"{self.state_id}-{self.collection}" if self.collection else self.state_id

    def to_bytes(self) -> bytes:
        # An older program can read manifests without collections, or also without packs.
        number = FORMAT if self.collection else 2 if any(path.startswith("blobs/") for path in self.files) else 1
        head = {"format": number, "needs": READ_SINCE[number]}
        return orjson.dumps({**head, **asdict(self)}, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "RemoteManifest":
        """Raises StoreError if it is damaged, or of a newer program."""
        try:
            found: dict[str, Any] = orjson.loads(data)
            if found["format"] > FORMAT:
                needs = str(found.get("needs", ""))
                raise StoreError(newer_format(f"{where} is", found["format"], known=FORMAT, needs=needs))
            return cls(
                state_id=found["state_id"],
                generation=found["generation"],
                files={_checked(path): RemoteFile(**one) for path, one in found["files"].items()},
                compaction=found["compaction"],
                compacted={head: tuple(names) for head, names in found["compacted"].items()},
                retired_objects=found["retired_objects"],
                collection=found.get("collection", 0),
                closed_until=found.get("closed_until", 0.0),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError(
                f"{where} is damaged ({error}): restore it from a copy, or remove it and push the state again from its "
                "origin"
            ) from error


def _checked(path: str) -> str:
    """Raises ValueError if it is outside the state, or a private file of the folder."""
    if not _PATH.fullmatch(path) or ".." in path.split("/"):
        raise ValueError(f"'{path[:100]}' is not a file of a state")
    return path


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The manifest as it is now, and its version for a swap."""

    manifest: RemoteManifest
    version: str


def read_remote(bucket: Bucket) -> Remote | None:
    """None if nothing was pushed yet. Raises StoreError."""
    found = bucket.read(KEY)
    if found is None:
        return None
    return Remote(manifest=RemoteManifest.from_bytes(found.data, where=f"{bucket.url}/{KEY}"), version=found.version)


def read_base(root: Path, name: str = BASE) -> RemoteManifest | None:
    """The manifest that was last pushed from, or pulled to, a state folder. Raises StoreError."""
    path = root / FOLDER / name
    try:
        return RemoteManifest.from_bytes(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        return None


def write_base(root: Path, manifest: RemoteManifest, name: str = BASE) -> None:
    """Raises StoreError."""
    write_file(root / FOLDER / name, manifest.to_bytes())


class Hashes:
    """SHA-256 of files of a state folder; an unchanged file is not read again."""

    FILE = "hashes.json"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / FOLDER / self.FILE
        try:
            self._known: dict[str, list[Any]] = orjson.loads(self._path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            self._known = {}
        self._used: dict[str, list[Any]] = {}

    def size(self, path: str) -> int:
        """Raises FileNotFoundError."""
        return (self._root / path).stat().st_size

    def of(self, path: str) -> RemoteFile:
        """Raises FileNotFoundError."""
        full = self._root / path
        status = full.stat()
        known = self._known.get(path)
        # A file that changes again within a clock tick keeps its time: the newest files are read again.
        is_settled = status.st_mtime < time.time() - 2.0
        if not (known and is_settled and known[:2] == [status.st_size, status.st_mtime_ns]):
            with full.open("rb") as file:
                known = [status.st_size, status.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest()]
        self._used[path] = known
        return RemoteFile(sha256=known[2], num_bytes=known[0])

    def save(self) -> None:
        """Raises StoreError."""
        write_file(self._path, orjson.dumps(self._used))
