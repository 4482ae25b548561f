"""manifest.json: a checkpoint's origin and the SHA-256 of every file in it, verified on load.

One thread hashes about a gigabyte per second and hashlib releases the GIL, so files are hashed in parallel.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from osworld_pipeline.agent.adapters import BASE_FILE
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.version import newer_format
from osworld_pipeline.errors import StoreError

MANIFEST_FILE = "manifest.json"
FORMAT = 1
READ_SINCE = {1: "0.1.0"}
"""The first version of this program that reads each format."""
NOT_LISTED = (MANIFEST_FILE, BASE_FILE)
"""Files without an entry. The recorded location of a base may be corrected; a digest identifies the base."""
MAX_HASH_THREADS = 8
MIN_KNOWN_BYTES = 64 << 20
"""Digests of files of at least this size are cached. Hashing them takes longer than the resolution of modification
times, so a file that is changed after hashing has another time."""
MAX_KNOWN = 1024
"""Number of cached digests."""


def build_manifest(folder: Path, trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    """Lists the files that are in `folder` now. `trainer_state`: a TrainerState as a mapping; may be empty."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NOT_LISTED]
    digests = file_digests(paths)
    return {
        "format": FORMAT,
        "needs": READ_SINCE[FORMAT],
        "checkpoint_id": trainer_state.get("checkpoint_id"),
        "parent_id": trainer_state.get("parent_id"),
        "num_updates": trainer_state.get("num_updates"),
        "recipe": trainer_state.get("recipe"),
        "recipe_digest": digest_json(trainer_state.get("recipe")),
        "data_digest": trainer_state.get("data_digest"),
        "code_version": trainer_state.get("code_version") or None,
        "files": {
            str(path.relative_to(folder)): {"sha256": digests[path], "num_bytes": path.stat().st_size} for path in paths
        },
    }


def verify_checkpoint(folder: Path, *, is_required: bool = False) -> None:
    """A folder without a manifest (a published model) passes, unless one is required.

    Raises:
        StoreError: a file is missing or has changed, or the manifest cannot be read or is of a newer format; names the
            file.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file() and not is_required:
        return
    try:
        found = json.loads(path.read_text())
        number, files = int(found.get("format", FORMAT)), found["files"]
        wanted = {name: (str(entry["sha256"]), int(entry["num_bytes"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_way_out(folder)}") from error
    if number > FORMAT:
        raise StoreError(newer_format(f"{path} is", number, known=FORMAT, needs=str(found.get("needs", ""))))
    for name, (_, num_bytes) in wanted.items():
        file = folder / name
        if not file.is_file():
            raise StoreError(f"{file} is missing: {_way_out(folder)}")
        if file.stat().st_size != num_bytes:
            raise StoreError(f"{file} is damaged, its size is not the manifest's: {_way_out(folder)}")
    hashes = _hash_all(folder / name for name in wanted)
    for name, (sha256, _) in wanted.items():
        file = folder / name
        if hashes[file] != sha256:
            raise StoreError(f"{file} is damaged, its SHA-256 is not the manifest's: {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    return f"remove {folder} and run the stage again"


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 (hex) of each file. A large file that this process hashed before, under any name, is not read again while
    its size and modification time are the same."""
    places = {path: _identity(path) for path in paths}
    with _known_lock:
        digests = {path: _known[place] for path, place in places.items() if place in _known}
    fresh = _hash_all(path for path in places if path not in digests)
    with _known_lock:
        for path, digest in fresh.items():
            if places[path].num_bytes >= MIN_KNOWN_BYTES:
                _known[places[path]] = digest
        while len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
    return digests | fresh


class _Identity(NamedTuple):
    """Identity of a file's content; hard links share it."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


_known: OrderedDict[_Identity, str] = OrderedDict()
_known_lock = threading.Lock()


def _identity(path: Path) -> _Identity:
    found = path.stat()
    return _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _hash_all(paths: Iterable[Path]) -> dict[Path, str]:
    """Hashes the largest first, so that none of them is left to the end."""
    ordered = sorted(paths, key=lambda path: -path.stat().st_size)
    if not ordered:
        return {}
    num_threads = min(len(ordered), MAX_HASH_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="sha256") as threads:
        return dict(zip(ordered, threads.map(_digest, ordered), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
