"""Screenshots by their hash: the name is checked before a path is made from it; the bytes determine the type."""

from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.web.viewer.episode import SHA256
from osworld_pipeline.web.viewer.settings import NotFoundError

_TYPES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"))
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Picture:
    data: bytes
    media_type: str


def read_picture(root: Path, sha256: str) -> Picture:
    """
    Raises:
        NotFoundError: it is not a hash, or the store has no such image, or the image is too large, cannot be read, or
            is in no known format.
    """
    if not SHA256.fullmatch(sha256):
        raise NotFoundError("an image is named by its SHA-256, 64 hexadecimal digits")
    try:
        blobs = BlobStore(root)
        if blobs.size(sha256) > MAX_BYTES:
            raise NotFoundError(f"image {sha256} is larger than {MAX_BYTES >> 20} MB")
        data = blobs.read(sha256)
    except StoreError as error:
        raise NotFoundError(str(error)) from error
    except OSError as error:
        raise NotFoundError(f"image {sha256} cannot be read: {error.strerror}") from error
    return Picture(data, media_type_of(data, sha256))


def media_type_of(data: bytes, sha256: str) -> str:
    """
    Raises:
        NotFoundError: the image is neither PNG, JPEG nor WebP.
    """
    for magic, media_type in _TYPES:
        if data.startswith(magic):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise NotFoundError(f"image {sha256} is neither PNG, JPEG nor WebP")
