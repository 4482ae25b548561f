"""Images by content: each is stored once, under the SHA-256 of its exact bytes."""

from pathlib import Path

from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.durable import remove_stale_temps, write_file
from osworld_pipeline.errors import StoreError

SUFFIXES = ("png", "jpeg", "jpg", "webp")
INCOMING = "incoming"
"""Blobs are written here first, so that what killed writers left is found without reading 256 folders."""


class BlobStore:
    """`root/ab/ab12...ef.png`; any number of writers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, data: bytes, *, suffix: str) -> str:
        """Stores `data` unless it is there; returns its SHA-256. Raises StoreError."""
        sha256 = digest_bytes(data)
        path = self.path(sha256, suffix=suffix)
        if not path.is_file():
            write_file(path, data, temp_folder=self.root / INCOMING)
        return sha256

    def path(self, sha256: str, *, suffix: str) -> Path:
        suffix = suffix.lstrip(".").lower()
        if suffix not in SUFFIXES:
            raise StoreError(f"image blobs are {', '.join(SUFFIXES)}, not '{suffix}'")
        return self.root / sha256[:2] / f"{sha256}.{suffix}"

    def find(self, sha256: str) -> Path:
        """The file of a blob, whatever its format.

        Raises:
            StoreError: there is none.
        """
        for suffix in SUFFIXES:
            path = self.path(sha256, suffix=suffix)
            if path.is_file():
                return path
        raise StoreError(
            f"image {sha256} is not in {self.root}: rebuild what refers to it, or restore the folder from a copy"
        )

    def read(self, sha256: str) -> bytes:
        return self.find(sha256).read_bytes()

    def remove_stale_temps(self) -> int:
        return remove_stale_temps(self.root / INCOMING)
