"""A pack: many images in one file that is written once. It is an uncompressed zip with a member `<SHA-256>.<format>`
for each image, so any program can list it, check it and extract an image (`unzip -p PACK NAME`)."""

import calendar
import errno
import os
import re
import struct
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.errors import StoreError

SUFFIX = ".zip"
SUFFIXES = ("png", "jpeg", "jpg", "webp")
"""Suffixes of images."""
NAME_BYTES = 64 + 1 + 4
"""Maximum length of an image's name."""
MAX_IMAGES = 50_000
"""Maximum of one pack: below 65,535, above which a zip needs 64-bit records."""
MAX_IMAGE_BYTES = 1 << 30
"""A larger image stays in its own file, so that a pack is below 4 GiB."""
_NAME = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(SUFFIXES)})")
_HEADER = struct.Struct("<4s5H3I2H")
_MAGIC = b"PK\x03\x04"
_FIRST_S, _LAST_S = 315_532_800, 4_354_819_198
"""The range of times in a zip: 1980 to 2107."""


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    offset: int
    """Offset of the image's first byte in the pack."""
    num_bytes: int
    modified: int
    """The time at which the image was last written or touched, in seconds since 1970."""

    @property
    def sha256(self) -> str:
        return self.name[:64]


class PackWriter:
    """Writes a temporary file; `close` completes the pack."""

    def __init__(self, temp: Path) -> None:
        self._zip = zipfile.ZipFile(temp, "w", zipfile.ZIP_STORED)
        self.members: list[Member] = []
        self.num_bytes = 0

    def add(self, name: str, data: bytes, modified: float) -> None:
        """`name`: the SHA-256 of `data`, a dot, its format."""
        when = min(max(int(modified), _FIRST_S), _LAST_S)
        member = zipfile.ZipInfo(name, date_time=time.gmtime(when)[:6])
        member.create_system, member.external_attr = 3, 0o644 << 16
        self._zip.writestr(member, data)
        offset = member.header_offset + _HEADER.size + len(name)
        self.members.append(Member(name=name, offset=offset, num_bytes=len(data), modified=when))
        self.num_bytes += len(data)

    def close(self) -> None:
        self._zip.close()


def read_members(path: Path) -> list[Member]:
    """The images of a pack, in their order in the file.

    Raises:
        FileNotFoundError: there is no such pack (any more).
        StoreError: it is damaged, or not a pack, or the file system refused.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as pack:
            size = os.fstat(file.fileno()).st_size
            return [_member(file.fileno(), info, size) for info in pack.infolist()]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) or _damaged(path, error) from error
    # zipfile raises many kinds of errors for bytes that are not a zip.
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError) as error:
        raise _damaged(path, error) from error


def _member(descriptor: int, info: zipfile.ZipInfo, file_bytes: int) -> Member:
    """Raises ValueError if it is not a member of ours."""
    if not _NAME.fullmatch(info.filename):
        raise ValueError(f"'{info.filename[:80]}' does not name an image")
    header = os.pread(descriptor, _HEADER.size, info.header_offset)
    magic, *_, num_name, num_extra = _HEADER.unpack(header)
    offset = info.header_offset + _HEADER.size + num_name + num_extra
    is_stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
    if magic != _MAGIC or not is_stored or offset + info.file_size > file_bytes:
        raise ValueError(f"{info.filename} is compressed, or not whole in the file")
    return Member(
        name=info.filename,
        offset=offset,
        num_bytes=info.file_size,
        modified=calendar.timegm((*info.date_time, 0, 0, 0)),
    )


def read_image(path: Path, sha256: str, *, offset: int, num_bytes: int) -> bytes:
    """
    Raises:
        FileNotFoundError: there is no such pack (any more).
        StoreError: the bytes there are not the image, or the file system refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            data = os.pread(descriptor, num_bytes, offset)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) or _damaged(path, error) from error
    if digest_bytes(data) != sha256:
        raise _damaged(path, f"image {sha256} has other bytes")
    return data


def read_name(path: Path, sha256: str, *, offset: int) -> str | None:
    """The name of the image whose first byte is at `offset`; None if another image or none is there. Raises
    FileNotFoundError, StoreError."""
    start = max(0, offset - NAME_BYTES)
    try:
        with path.open("rb") as file:
            return name_before(os.pread(file.fileno(), offset - start, start), sha256)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) or _damaged(path, error) from error


def name_before(data: bytes, sha256: str) -> str | None:
    """The image's name at the end of `data`, the bytes before the image: its header ends with the name."""
    names = (f"{sha256}.{suffix}" for suffix in SUFFIXES)
    return next((name for name in names if data.endswith(name.encode())), None)


def unreadable(path: Path, error: OSError) -> StoreError | None:
    """The error for a refusal of the file system, which is not damage of the file; None for an invalid offset, which
    only a damaged file has."""
    if error.errno == errno.EINVAL:
        return None
    return StoreError(
        f"{path} cannot be read: {error.strerror or error}; fix that and run again, the file may be intact"
    )


def _damaged(path: Path, why: object) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): restore it from a copy, or remove it and lose only its images")
