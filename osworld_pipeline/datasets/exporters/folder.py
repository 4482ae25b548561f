"""An export's folder: written to a temporary folder, synced, and moved into place by one rename (two, if it replaces an
earlier export on a system that cannot swap folders). An existing target is kept unless the caller replaces an earlier
export."""

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from osworld_pipeline.errors import StoreError
from osworld_pipeline.temp_names import is_stale, temp_name

MANIFEST = "export.json"
"""A file in the root of every export, which describes it. Only a folder with this file is replaced."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def export_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yields an empty folder to fill; at the end it is renamed to `target`, or removed after a failure.

    Raises:
        StoreError: `target` exists and may not be replaced, or the file system refused.
    """
    target = target.absolute()
    _refuse_existing(target, replace=replace)
    temp = target.parent / temp_name("export")
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_exports(target.parent)
            temp.mkdir()
            yield temp
            # One call for all files: an export may have a million.
            os.sync()
            _refuse_existing(target, replace=replace)
            _put(temp, target)
        except OSError as error:
            raise StoreError(
                f"cannot write the export {target}: {error.strerror or error}; fix that and run again. "
                "No partial output remains"
            ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def write_manifest(folder: Path, kind: str, content: Mapping[str, Any]) -> None:
    text = json.dumps({"kind": kind, **content}, ensure_ascii=False, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def remove_stale_exports(parent: Path) -> int:
    """Removes the temporary folders of killed exporters in `parent`, not those of running ones."""
    removed = 0
    for path in parent.glob(".*.export"):
        if is_stale(path):
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def folder_name(text: str) -> str:
    """`text` as the name of one folder: characters that a file system or a shell may misread become underscores."""
    name = re.sub(r"[^A-Za-z0-9._@+=-]", "_", text)[:180]
    return f"_{name}" if not name.strip("._") or name.startswith(".") else name


def _refuse_existing(target: Path, *, replace: bool) -> None:
    if not target.is_symlink() and (not target.exists() or (target.is_dir() and not any(target.iterdir()))):
        return
    if not replace:
        raise StoreError(f"{target} exists: choose another folder, or add --replace to replace it")
    if target.is_symlink() or not (target / MANIFEST).is_file():
        raise StoreError(
            f"{target} is not an export (a link, or without {MANIFEST}): remove it yourself, or choose another folder"
        )


def _put(temp: Path, target: Path) -> None:
    """Moves `temp` to `target`. Afterwards `temp` is gone, or contains the former `target`."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(temp, target)
    elif not _exchange(temp, target):
        # Between the two renames, `target` does not exist.
        old = temp.with_name(temp_name("export"))
        os.rename(target, old)
        os.rename(temp, target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one call; False if the system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))
