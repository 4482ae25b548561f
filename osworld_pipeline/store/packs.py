"""The packs of an image store as a process sees them: `packs/<name>.zip`, and `packs/index/<name>.index`, which say
which image is where.

A pack counts from the moment an index names it, and until its file is gone; an index that another replaces says nothing
new. So what a reader knows may be old, and is never wrong: an entry whose pack is gone is passed over.
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
"""A folder that was changed so shortly before it was listed may change again within one tick of its clock."""
NUM_LOOKS = 5
_DIGEST_HEX = 64


class Packs:
    """Of one store; any number of threads. Take it from `open_packs`, which keeps what it has mapped."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index_root = root / INDEX_FOLDER
        self._lock = threading.Lock()
        self._listed: tuple[int, int] | None = None
        """The folder's inode and time of change when it was listed; None where another listing may have the same."""
        self._indexes: tuple[PackIndex, ...] = ()

    def indexes(self) -> tuple[PackIndex, ...]:
        """Those that count now, the smallest first. Raises StoreError where one is damaged."""
        try:
            status = os.stat(self.index_root)
            if self._listed == (status.st_ino, status.st_mtime_ns):
                return self._indexes
            with self._lock:
                for _ in range(NUM_LOOKS):
                    self._list(status)
                    before, status = status, os.stat(self.index_root)
                    # Else an index may have taken the place of others between two names of the listing.
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
            with suppress(FileNotFoundError):  # another says the same by now
                found.append(known.get(path.name) or PackIndex(path))
        replaced = frozenset[str]().union(*(index.replaces for index in found))
        self._indexes = tuple(sorted((index for index in found if index.name not in replaced), key=_size))
        self._listed = (status.st_ino, status.st_mtime_ns) if is_settled else None

    def entries(self, sha256: str) -> Iterator[Entry]:
        """Where the indexes say that an image lies, whether or not its pack is here. Raises StoreError."""
        digest = _digest(sha256)
        for index in self.indexes() if digest else ():
            yield from index.find(digest)

    def find(self, sha256: str) -> Entry | None:
        """An entry whose pack is here. Raises StoreError."""
        return next((entry for entry in self.entries(sha256) if self.path(entry.pack).is_file()), None)

    def read(self, sha256: str) -> bytes | None:
        """An image by its hash, which its bytes are checked against; None where no pack that is here has it.

        Raises:
            StoreError: an index or the pack is damaged.
        """
        for entry in self.entries(sha256):
            try:
                return read_image(self.path(entry.pack), sha256, offset=entry.offset, num_bytes=entry.num_bytes)
            except FileNotFoundError:
                continue  # made again under another name, or no longer needed
            except StoreError:
                self.check()  # else a whole pack would be taken for damaged
                raise
        return None

    def check(self) -> None:
        """Raises StoreError where an index is damaged, which then is why an image is not found."""
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
        """Names of the packs that are files of this folder."""
        return frozenset(path.name for path in _visible(self.root, PACK_SUFFIX))

    def named(self) -> frozenset[str]:
        """Names of the packs that an index knows. Raises StoreError."""
        return frozenset(name for index in self.indexes() for name in index.packs)


def write_pack(root: Path, images: Iterator[tuple[str, bytes, float]], *, temp_folder: Path) -> str:
    """A pack and then its index, each whole or not at all. `images`: name, bytes, time of change of each, at least one.

    Raises:
        StoreError: the file system refused.
    """
    # Names in the order of time: what was packed together is copied together.
    name = f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}{PACK_SUFFIX}"
    with replacing(root / name, temp_folder=temp_folder) as temp:
        writer = PackWriter(temp)
        for image in images:
            writer.add(*image)
        writer.close()
    index_pack(root, name, temp_folder=temp_folder, members=writer.members)
    return name


def index_pack(root: Path, name: str, *, temp_folder: Path, members: Sequence[Member] | None = None) -> None:
    """Makes a pack count. Raises StoreError."""
    records = records_of(read_members(root / name) if members is None else members)
    write_index(index_path(root, name), [name], [records], temp_folder=temp_folder)


def index_path(root: Path, pack: str) -> Path:
    """Of the index that is written with a pack."""
    return root / INDEX_FOLDER / f"{pack.removesuffix(PACK_SUFFIX)}{SUFFIX}"


@lru_cache(maxsize=32)
def open_packs(blobs: Path) -> Packs:
    """The packs of an image store's folder."""
    return Packs(blobs / FOLDER)


def _digest(sha256: str) -> bytes:
    """Empty where it is no SHA-256: no pack has it."""
    try:
        return bytes.fromhex(sha256) if len(sha256) == _DIGEST_HEX else b""
    except ValueError:
        return b""


def _size(index: PackIndex) -> tuple[int, str]:
    return index.num_bytes, index.name


def _visible(folder: Path, suffix: str) -> Iterator[Path]:
    return (path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
