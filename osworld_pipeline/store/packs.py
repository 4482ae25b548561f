"""The packs of an image store as a process sees them: `packs/<name>.zip`, and `packs/index/<name>.index`, which locate
the images.

A pack is live while an index names it and its file exists; a replaced index has no additional records. So a reader's
data may be old but not wrong: an entry whose pack is gone is skipped.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from osworld_pipeline.atomic_io import replacing
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.pack_files import SUFFIX as PACK_SUFFIX
from osworld_pipeline.store.pack_files import Member, PackWriter, read_image, read_members, read_name
from osworld_pipeline.store.pack_index import SUFFIX, Entry, PackIndex, records_of, write_index

FOLDER = "packs"
INDEX_FOLDER = "index"
SETTLED_NS = 2_000_000_000
"""A listing is not kept if the folder was changed less than this time before it: a later change may leave the folder's
time of change the same."""
NUM_LOOKS = 5
_DIGEST_HEX = 64


class Packs:
    """The packs of one store, for any number of threads. Use `open_packs`, which caches the mapped indexes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index_root = root / INDEX_FOLDER
        self._lock = threading.Lock()
        self._listed: tuple[int, int] | None = None
        """The folder's inode and time of change when it was listed; None if another listing may have the same."""
        self._indexes: tuple[PackIndex, ...] = ()

    def indexes(self) -> tuple[PackIndex, ...]:
        """The live indexes, the smallest first. Raises StoreError if one is damaged."""
        try:
            status = os.stat(self.index_root)
            if self._listed == (status.st_ino, status.st_mtime_ns):
                return self._indexes
            with self._lock:
                for _ in range(NUM_LOOKS):
                    self._list(status)
                    before, status = status, os.stat(self.index_root)
                    # Otherwise an index may have replaced others during the listing.
                    if status.st_mtime_ns == before.st_mtime_ns:
                        break
                return self._indexes
        except FileNotFoundError:
            return ()

    def _list(self, status: os.stat_result) -> None:
        is_settled = status.st_mtime_ns < time.time_ns() - SETTLED_NS
        known = {index.name: index for index in self._indexes}
        found: list[PackIndex] = []
        for path in _visible(self.index_root, SUFFIX):
            with suppress(FileNotFoundError):  # another index has replaced it
                found.append(known.get(path.name) or PackIndex(path))
        replaced = frozenset[str]().union(*(index.replaces for index in found))
        self._indexes = tuple(sorted((index for index in found if index.name not in replaced), key=_size))
        self._listed = (status.st_ino, status.st_mtime_ns) if is_settled else None

    def entries(self, sha256: str) -> Iterator[Entry]:
        """The entries of an image in the indexes, whether or not the pack exists here. Raises StoreError."""
        digest = _digest(sha256)
        for index in self.indexes() if digest else ():
            yield from index.find(digest)

    def find(self, sha256: str) -> Entry | None:
        """An entry whose pack exists here. Raises StoreError."""
        return next((entry for entry in self.entries(sha256) if self.path(entry.pack).is_file()), None)

    def read(self, sha256: str) -> bytes | None:
        """An image by its hash, with its bytes checked; None if no pack here has it.

        Raises:
            StoreError: an index or the pack is damaged.
        """
        for entry in self.entries(sha256):
            try:
                return read_image(self.path(entry.pack), sha256, offset=entry.offset, num_bytes=entry.num_bytes)
            except FileNotFoundError:
                continue  # rewritten under another name, or no longer needed
            except StoreError:
                self.check()  # otherwise an intact pack would be reported as damaged
                raise
        return None

    def check(self) -> None:
        """Raises StoreError if an index is damaged, which may be why an image is not found."""
        for index in self.indexes():
            index.check()

    def path(self, pack: str) -> Path:
        return self.root / pack

    def member(self, sha256: str) -> str | None:
        """`<pack>/<SHA-256>.<format>` of an image. Raises StoreError."""
        entry = self.find(sha256)
        name = read_name(self.path(entry.pack), sha256, offset=entry.offset) if entry else None
        return f"{entry.pack}/{name}" if entry and name else None

    def here(self) -> frozenset[str]:
        """Names of the packs in this folder."""
        return frozenset(path.name for path in _visible(self.root, PACK_SUFFIX))

    def named(self) -> frozenset[str]:
        """Names of the packs in the indexes. Raises StoreError."""
        return frozenset(name for index in self.indexes() for name in index.packs)


def write_pack(root: Path, images: Iterator[tuple[str, bytes, float]], *, temp_folder: Path) -> str:
    """Writes a pack and then its index, each atomically. `images`: name, bytes, time of change of each, at least one.

    Raises:
        StoreError: the file system refused.
    """
    # Names in time order: images packed together are copied together.
    name = f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}{PACK_SUFFIX}"
    with replacing(root / name, temp_folder=temp_folder) as temp:
        writer = PackWriter(temp)
        for image in images:
            writer.add(*image)
        writer.close()
    index_pack(root, name, temp_folder=temp_folder, members=writer.members)
    return name


def index_pack(root: Path, name: str, *, temp_folder: Path, members: Sequence[Member] | None = None) -> None:
    """Writes the index of a pack, which makes it live. Raises StoreError."""
    records = records_of(read_members(root / name) if members is None else members)
    write_index(index_path(root, name), [name], [records], temp_folder=temp_folder)


def index_path(root: Path, pack: str) -> Path:
    """Path of the index that is written with a pack."""
    return root / INDEX_FOLDER / f"{pack.removesuffix(PACK_SUFFIX)}{SUFFIX}"


@lru_cache(maxsize=32)
def open_packs(blobs: Path) -> Packs:
    """The packs of an image store's folder."""
    return Packs(blobs / FOLDER)


def _digest(sha256: str) -> bytes:
    """The digest; empty if `sha256` is not a SHA-256, so that no pack is searched."""
    try:
        return bytes.fromhex(sha256) if len(sha256) == _DIGEST_HEX else b""
    except ValueError:
        return b""


def _size(index: PackIndex) -> tuple[int, str]:
    return index.num_bytes, index.name


def _visible(folder: Path, suffix: str) -> Iterator[Path]:
    return (path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
