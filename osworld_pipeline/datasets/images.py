"""Images of demonstrations: base64, data URIs, or paths relative to the source. Their structure is checked; the pixels
are not decoded, because that costs a hundred times more.
"""

import binascii
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from pybase64 import b64decode

from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.domain.observation import MAX_PIXELS
from osworld_pipeline.errors import DatasetError

MAX_IMAGE_BYTES = 256 * 2**20
_DATA_URI = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_PATH = re.compile(r"[^\x00]{1,1024}\.(?:png|jpe?g|webp)", re.IGNORECASE)
_PNG = b"\x89PNG\r\n\x1a\n"
# Start-of-frame markers, which contain the size; C4, C8 and CC are other segments.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))


def load_image(text: str, folder: Path) -> tuple[bytes, str]:
    """The bytes of an image of a record, and the suffix of its format; a path is relative to `folder` and must stay in
    it.

    Raises:
        DatasetError: neither base64, a data URI nor a path; a missing file; not PNG, JPEG or WebP; too large; or
            damaged.
    """
    if len(text) <= 1024 and _PATH.fullmatch(text):
        data = _read(text, folder)
        return data, prove_image(data)
    return decode_image(text)


def decode_image(text: str) -> tuple[bytes, str]:
    """The bytes of a base64 string or data URI, and the suffix of their format. Raises DatasetError like load_image."""
    match = _DATA_URI.match(text[:64])
    encoded = text[match.end() :] if match else text
    try:
        data = b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        try:
            data = b64decode("".join(encoded.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DatasetError(f"not base64: {error}") from error
    return data, prove_image(data)


def prove_image(data: bytes) -> str:
    """Returns png, jpeg or webp if the structure of the image is complete. Raises DatasetError."""
    try:
        if data.startswith(_PNG):
            suffix, size = "png", _png_size(data)
        elif data.startswith(b"\xff\xd8\xff"):
            suffix, size = "jpeg", _jpeg_size(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            suffix, size = "webp", _webp_size(data)
        else:
            raise DatasetError("neither PNG, JPEG nor WebP")
    except IndexError as error:
        raise DatasetError("a damaged image: it ends too early") from error
    width, height = size
    if width * height > MAX_PIXELS:
        raise DatasetError(f"the image has {width}x{height} pixels; at most {MAX_PIXELS} are accepted")
    if not width or not height:
        raise DatasetError("a damaged image: it has no pixels")
    return suffix


def _read(text: str, folder: Path) -> bytes:
    try:
        root = folder.resolve()
        path = (root / text).resolve()
        if not path.is_relative_to(root):
            raise DatasetError(f"the path {text!r} points outside the source's folder")
        return read_regular_file(path, max_bytes=MAX_IMAGE_BYTES)
    except (OSError, ValueError, RuntimeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DatasetError(f"cannot read {text!r}: {why}") from error


def _number(data: bytes, start: int, length: int, *, little: bool = False) -> int:
    if start + length > len(data):
        raise IndexError
    return int.from_bytes(data[start : start + length], "little" if little else "big")


def _png_size(data: bytes) -> tuple[int, int]:
    view, place, size, num_pixel_bytes = memoryview(data), len(_PNG), (0, 0), 0
    while True:
        length = _number(data, place, 4)
        kind = data[place + 4 : place + 8]
        end = place + 8 + length
        if zlib.crc32(view[place + 4 : end]) != _number(data, end, 4):
            raise DatasetError(f"a damaged image: a wrong checksum in its PNG chunk at byte {place}")
        if place == len(_PNG):
            if kind != b"IHDR" or length != 13:
                raise DatasetError("a damaged image: a PNG without its header")
            size = _number(data, place + 8, 4), _number(data, place + 12, 4)
        if kind == b"IDAT":
            num_pixel_bytes += length
        if kind == b"IEND":
            if not num_pixel_bytes:
                raise DatasetError("a damaged image: a PNG without pixel data")
            return size
        place = end + 4


def _jpeg_size(data: bytes) -> tuple[int, int]:
    place, size = 2, (0, 0)
    while True:
        if data[place] != 0xFF:
            raise DatasetError(f"a damaged image: no JPEG segment at byte {place}")
        while data[place] == 0xFF:
            place += 1
        marker = data[place]
        place += 1
        if marker == 0xDA:
            break
        if marker in _JPEG_ALONE:
            continue
        length = _number(data, place, 2)
        if marker in _JPEG_FRAMES:
            size = _number(data, place + 5, 2), _number(data, place + 3, 2)
        place += max(length, 2)
    end = data.rfind(b"\xff\xd9", place)
    if end < 0:
        raise DatasetError("a damaged image: the JPEG has no end")
    if end <= place + _number(data, place, 2):
        raise DatasetError("a damaged image: a JPEG without pixel data")
    return size


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Kind and length of each chunk."""
    place = 12
    while place + 8 <= len(data):
        length = _number(data, place + 4, 4, little=True)
        yield data[place : place + 4], length
        place += 8 + length + length % 2


def _webp_size(data: bytes) -> tuple[int, int]:
    if len(data) < _number(data, 4, 4, little=True) + 8:
        raise DatasetError("a damaged image: the WebP is cut")
    kind = data[12:16]
    if not any(kind in (b"VP8 ", b"VP8L", b"ANMF") and length for kind, length in _webp_chunks(data)):
        raise DatasetError("a damaged image: a WebP without pixel data")
    if kind == b"VP8X":
        return _number(data, 24, 3, little=True) + 1, _number(data, 27, 3, little=True) + 1
    if kind == b"VP8L":
        bits = _number(data, 21, 4, little=True)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _number(data, 26, 2, little=True) & 0x3FFF, _number(data, 28, 2, little=True) & 0x3FFF
    raise DatasetError("a damaged image: a WebP without a picture")
