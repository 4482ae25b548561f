"""An index of packs: the pack and offset of each image. It is sorted by SHA-256 and memory-mapped, so a look-up costs
only the pages that it touches, and a process holds no list of images.

    "OSWPACK1"
    a record of 48 bytes for each image: its SHA-256 (32 bytes), and four numbers of 32 bits: the index of its pack in
      `packs`, the offset of its first byte there, its size in bytes, when it was last touched (seconds since 1970)
    {"packs": [names], "replaces": [names of indexes], "num_records": n, "crc32": of the records}   as JSON
    the length of the JSON and its CRC-32, of 32 bits each, and "OSWPACK1"

All numbers are little-endian. All data of an index is also in its packs: a lost index is rebuilt from them.
"""

import mmap
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from osworld_pipeline.atomic_io import replacing
from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.pack_files import Member, unreadable

SUFFIX = ".index"
CHUNK = 65_536
"""Records in memory at once."""
RECORD = np.dtype([("digest", "V32"), ("pack", "<u4"), ("offset", "<u4"), ("num_bytes", "<u4"), ("modified", "<u4")])
_MAGIC = b"OSWPACK1"
_FOOT = struct.Struct("<II8s")
_ENTRY = struct.Struct("<4I")
_DIGEST = 32
_FIRST = len(_MAGIC)


@dataclass(frozen=True, kw_only=True)
class Entry:
    pack: str
    offset: int
    num_bytes: int
    modified: int


class PackIndex:
    """One index file, which does not change."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            FileNotFoundError: it does not exist (any more).
            StoreError: the file is damaged, or the file system refused.
        """
        self.path = path
        self.name = path.name
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            foot = self._read_foot()
            self.packs: tuple[str, ...] = tuple(map(str, foot["packs"]))
            self.replaces: frozenset[str] = frozenset(map(str, foot["replaces"]))
            self.num_records = int(foot["num_records"])
            self._crc32 = int(foot["crc32"])
            self._is_checked = False
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(path, error) or _damaged(path, error) from error
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise _damaged(path, error) from error

    def _read_foot(self) -> dict[str, Any]:
        data = self._map
        num_json, crc32, magic = _FOOT.unpack(data[-_FOOT.size :])
        start = len(data) - _FOOT.size - num_json
        if start < _FIRST or magic != _MAGIC or data[:_FIRST] != _MAGIC:
            raise ValueError("it is not an index of packs, or only a part of one")
        text = data[start : start + num_json]
        if zlib.crc32(text) != crc32:
            raise ValueError("the checksum of its footer is wrong")
        foot = orjson.loads(text)
        if start != _FIRST + foot["num_records"] * RECORD.itemsize:
            raise ValueError("its number of records is wrong")
        return foot

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def find(self, digest: bytes) -> Iterator[Entry]:
        """The entries of an image: usually one; more if several packs had it, of which some may be gone. Raises
        StoreError."""
        for place in range(self.first_from(digest), self.num_records):
            start = _FIRST + place * RECORD.itemsize
            if self._map[start : start + _DIGEST] != digest:
                return
            pack, offset, num_bytes, modified = _ENTRY.unpack_from(self._map, start + _DIGEST)
            if pack >= len(self.packs):
                raise _damaged(self.path, "a record names no pack")
            yield Entry(pack=self.packs[pack], offset=offset, num_bytes=num_bytes, modified=modified)

    def first_from(self, digest: bytes) -> int:
        """The index of the first record that is not below `digest`."""
        return bisect_left(range(self.num_records), digest, key=self._digest)

    def _digest(self, place: int) -> bytes:
        start = _FIRST + place * RECORD.itemsize
        return self._map[start : start + _DIGEST]

    def records(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """A copy of those records; `pack` is an index into `packs`."""
        end = self.num_records if end is None else min(end, self.num_records)
        whole = np.frombuffer(self._map, RECORD, count=self.num_records, offset=_FIRST)
        return whole[start:end].copy()

    def chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, self.num_records, CHUNK):
            yield self.records(start, start + CHUNK)

    def check(self) -> None:
        """Raises StoreError if a record is damaged; the first call reads the whole file."""
        if self._is_checked:
            return
        crc32, last = 0, b""
        for chunk in self.chunks():
            crc32 = zlib.crc32(chunk.tobytes(), crc32)
            digests = sort_keys(chunk)
            if not np.array_equal(digests, np.sort(digests)) or chunk["digest"][0].tobytes() < last:
                raise _damaged(self.path, "its records are not in order")
            last = chunk["digest"][-1].tobytes()
            if (chunk["pack"] >= len(self.packs)).any():
                raise _damaged(self.path, "a record names no pack")
        if crc32 != self._crc32:
            raise _damaged(self.path, "the checksum of its records is wrong")
        self._is_checked = True


def sort_keys(records: np.ndarray) -> np.ndarray:
    """The digests as text of fixed length, in the same sort order."""
    return np.ascontiguousarray(records["digest"]).view("S32")


def image_keys(records: np.ndarray) -> np.ndarray:
    """Does the same as image_sets.keys_of, for records."""
    digests = np.ascontiguousarray(records["digest"]).view(np.uint8).reshape(-1, _DIGEST)
    return np.ascontiguousarray(digests[:, :8]).view(">u8").ravel().astype(np.uint64)


def records_of(members: Sequence[Member]) -> np.ndarray:
    """The records of the images of one pack, in order."""
    records = np.zeros(len(members), RECORD)
    digests = np.frombuffer(b"".join(bytes.fromhex(member.sha256) for member in members), "V32")
    records["digest"] = digests
    for name in ("offset", "num_bytes", "modified"):
        records[name] = np.array([getattr(member, name) for member in members], np.uint32)
    return records[np.argsort(sort_keys(records), kind="stable")]


def write_index(
    path: Path, packs: Sequence[str], batches: Iterable[np.ndarray], *, temp_folder: Path, replaces: Sequence[str] = ()
) -> None:
    """Writes an index atomically. `batches`: records in order; `replaces`: indexes whose records it includes. Raises
    StoreError."""
    num_records = crc32 = 0
    with replacing(path, temp_folder=temp_folder) as temp, temp.open("wb") as file:
        file.write(_MAGIC)
        for records in batches:
            data = records.tobytes()
            crc32 = zlib.crc32(data, crc32)
            num_records += len(records)
            file.write(data)
        foot = {"packs": list(packs), "replaces": list(replaces), "num_records": num_records, "crc32": crc32}
        text = orjson.dumps(foot)
        file.write(text)
        file.write(_FOOT.pack(len(text), zlib.crc32(text), _MAGIC))


def _damaged(path: Path, why: object) -> StoreError:
    state = StateDir(path.parents[3])  # of STATE/blobs/packs/index/NAME
    advised = pipeline_line(state, "compact")
    return StoreError(f"{path} is damaged ({why}): remove it, and `{advised}` rebuilds it from the packs next to it")
