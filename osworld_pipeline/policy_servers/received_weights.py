"""The folders of weights that a receiver has on its disk: `<root>/<name>` is complete, `<root>/.incoming-<upload>` is
not."""

import os
import re
import shutil
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.atomic_io import sync_path
from osworld_pipeline.errors import EngineError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_-]{0,99}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors|config\.json|adapter_config\.json")
INDEX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors\.index\.json")
INCOMING = ".incoming-"
MARK = ".received-weights"
"""A file in the root: only a folder that a receiver created is cleaned."""
ABANDONED_S = 3600.0
"""An upload that has received nothing for this time is removed."""


class RefusedError(EngineError):
    """A request has a name that a receiver does not accept, or its content is not what was announced."""


@dataclass(frozen=True, kw_only=True)
class ReceivedWeights:
    root: Path
    keep: int
    """Maximum number of complete folders; the most recently used ones are kept."""

    def open(self) -> None:
        """Creates the root, and removes what a killed receiver left incomplete.

        Raises:
            EngineError: nothing can be written there, or it has files of others, which must not be removed.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not (self.root / MARK).exists():
                if any(self.root.iterdir()):
                    raise EngineError(
                        f"{self.root} has files that no receiver wrote, and old weights are removed there: name an "
                        "empty or a new folder"
                    )
                (self.root / MARK).touch()
            for folder in self.root.glob(f"{INCOMING}*"):
                shutil.rmtree(folder)
        except OSError as error:
            raise EngineError(f"weights cannot be stored in {self.root}: {error}") from error

    def find(self, name: str) -> Path | None:
        """The folder of complete weights, which counts as used now."""
        folder = self.root / _checked(NAME, name)
        if not folder.is_dir():
            return None
        os.utime(folder)
        return folder.resolve()

    async def write(self, upload: str, file_name: str, chunks: AsyncIterator[bytes]) -> int:
        """Writes one file of an upload; returns the CRC-32 of its content, so that the sender detects a damaged
        transfer.

        Raises:
            RefusedError: a name is not allowed.
            OSError: the disk is full.
        """
        pattern = INDEX_NAME if file_name.endswith(".index.json") else FILE_NAME
        folder = self._incoming(upload)
        path = folder / _checked(pattern, file_name)
        folder.mkdir(exist_ok=True)
        checksum = 0
        try:
            with path.open("wb") as file:
                async for chunk in chunks:
                    # Both are too short to need a thread: a chunk has about 64 KB, and the kernel writes it later.
                    checksum = zlib.crc32(chunk, checksum)
                    file.write(chunk)
        except BaseException:  # the client has gone, or the disk is full
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return checksum

    def complete(self, name: str, upload: str, files: Mapping[str, int]) -> Path:
        """Makes an upload the weights of that name. `files`: their sizes.

        Raises:
            RefusedError: the upload has other files.
        """
        target, folder = self.root / _checked(NAME, name), self._incoming(upload)
        found = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
        if found != dict(files) or not found:
            shutil.rmtree(folder, ignore_errors=True)
            raise RefusedError(f"the upload {upload} has the files {found}, and {dict(files)} were announced")
        for path in folder.iterdir():
            sync_path(path)
        if target.is_dir():  # another program was faster
            shutil.rmtree(folder)
        else:
            folder.rename(target)
            sync_path(self.root)
        os.utime(target)
        self._remove_old(target)
        return target.resolve()

    def _remove_old(self, newest: Path) -> None:
        complete = [path for path in self.root.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
        by_use = sorted((path for path in complete if path != newest), key=lambda path: path.stat().st_mtime)
        old = by_use[: max(0, len(by_use) - (self.keep - 1))]
        abandoned = time.time() - ABANDONED_S
        for folder in self.root.glob(f"{INCOMING}*"):
            newest_s = max((path.stat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)
            if newest_s < abandoned:
                old.append(folder)
        for folder in old:
            with suppress(OSError):
                shutil.rmtree(folder)

    def _incoming(self, upload: str) -> Path:
        return self.root / f"{INCOMING}{_checked(NAME, upload)}"


def _checked(pattern: re.Pattern[str], name: str) -> str:
    if not pattern.fullmatch(name):
        raise RefusedError(f"{name[:100]!r} is not a name of weights or of one of their files")
    return name
