"""The manifest of a state on an object store, and the copy of it that a state folder keeps of its last push or pull."""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store import Bucket
from osworld_pipeline.object_store.note import FOLDER
from osworld_pipeline.store.pack_files import SUFFIX as PACK_SUFFIX

KEY = "remote.json"
BASE = "base.json"
PENDING = "pending.json"
"""What a push is about to make the manifest."""
FORMAT = 3
"""1 had no packs of images, 2 no collections."""
_PATH = re.compile(r"((trajectories|tables|suites|checkpoints|blobs/packs)(/[A-Za-z0-9_][^/\\\0]*)+|osworld\.duckdb)")


def is_pack(path: str) -> bool:
    """Of images; its index is a file like any other."""
    return path.startswith("blobs/") and path.endswith(PACK_SUFFIX)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    sha256: str
    num_bytes: int

    def key(self, path: str) -> str:
        """Of the object of a file with this path: packs are found by their names, other files by their content."""
        return path if is_pack(path) else f"objects/{self.sha256[:2]}/{self.sha256}"


@dataclass(frozen=True, kw_only=True)
class RemoteManifest:
    state_id: str
    """Of the state, from its first push on."""
    generation: int
    """One more with each push."""
    files: Mapping[str, RemoteFile]
    """By their path in the state folder."""
    compaction: int = 0
    """The generation of the parts' own manifest."""
    compacted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """As that manifest names them, by head table."""
    retired_objects: Mapping[str, float] = field(default_factory=dict)
    """Objects that no path names any longer, and since when (Unix time)."""
    collection: int = 0
    """One more with each garbage collection. A journal of uploaded images counts for one number only."""
    closed_until: float = 0.0
    """Unix time until which a garbage collection removes objects: no push may begin or end before."""

    @property
    def journal(self) -> str:
        """Names the journal of the images that were uploaded for this state since its last garbage collection."""
        return f"{self.state_id}-{self.collection}" if self.collection else self.state_id

    def to_bytes(self) -> bytes:
        # An earlier version reads what has no collections, or no packs either.
        number = FORMAT if self.collection else 2 if any(path.startswith("blobs/") for path in self.files) else 1
        return orjson.dumps({"format": number, **asdict(self)}, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "RemoteManifest":
        """Raises StoreError where it is damaged, or of a newer program."""
        try:
            found: dict[str, Any] = orjson.loads(data)
            if found["format"] > FORMAT:
                raise StoreError(f"{where} was pushed by a newer version: update this program")
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
            raise StoreError(f"{where} is damaged ({error}): push the state again from its origin") from error


def _checked(path: str) -> str:
    """Raises ValueError where it would lie outside the state, or among what a folder keeps for itself."""
    if not _PATH.fullmatch(path) or ".." in path.split("/"):
        raise ValueError(f"'{path[:100]}' is no file of a state")
    return path


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The manifest as it is now, and its version for a swap."""

    manifest: RemoteManifest
    version: str


def read_remote(bucket: Bucket) -> Remote | None:
    """None where nothing was pushed yet. Raises StoreError."""
    found = bucket.read(KEY)
    if found is None:
        return None
    return Remote(manifest=RemoteManifest.from_bytes(found.data, where=f"{bucket.url}/{KEY}"), version=found.version)


def read_base(root: Path, name: str = BASE) -> RemoteManifest | None:
    """What was last pushed from, or pulled to, a state folder. Raises StoreError."""
    path = root / FOLDER / name
    try:
        return RemoteManifest.from_bytes(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        return None


def write_base(root: Path, manifest: RemoteManifest, name: str = BASE) -> None:
    """Raises StoreError."""
    write_file(root / FOLDER / name, manifest.to_bytes())


class Hashes:
    """SHA-256 of files of a state folder; one that has not changed since is not read again."""

    FILE = "hashes.json"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / FOLDER / self.FILE
        try:
            self._known: dict[str, list[Any]] = orjson.loads(self._path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            self._known = {}
        self._used: dict[str, list[Any]] = {}

    def of(self, path: str) -> RemoteFile:
        """Raises FileNotFoundError."""
        full = self._root / path
        status = full.stat()
        known = self._known.get(path)
        # A file that was changed within a tick of the clock has the same time: the newest are read again.
        is_settled = status.st_mtime < time.time() - 2.0
        if not (known and is_settled and known[:2] == [status.st_size, status.st_mtime_ns]):
            with full.open("rb") as file:
                known = [status.st_size, status.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest()]
        self._used[path] = known
        return RemoteFile(sha256=known[2], num_bytes=known[0])

    def save(self) -> None:
        """Raises StoreError."""
        write_file(self._path, orjson.dumps(self._used))
