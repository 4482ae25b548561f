"""Files that are built once and used by many processes: locks, atomic writes, and removal of old ones."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from osworld_pipeline.errors import DependencyError

_POLL_S = 0.2


@contextmanager
def locked(path: Path, *, limit_s: float) -> Generator[None, None, None]:
    """A lock held by one process at a time; it is released when the process is killed. DependencyError if another
    process holds it for `limit_s`."""
    with path.open("a") as file:
        until = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DependencyError(
                        f"another process has held {path} for {limit_s:g} s; end that process, or wait for it"
                    ) from None
                time.sleep(_POLL_S)
        yield


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Removes all but the `count` newest: files of older recipes, agents or QEMUs. A machine that is running keeps its
    open files."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[count:]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Removes the working folders of killed builders. Call it with the builders' lock held."""
    for path in folder.glob(f"{prefix}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def make_readable(folder: Path) -> None:
    """Makes a folder of files readable for every user who can reach it, under any umask."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def write_whole(path: Path, data: bytes) -> None:
    """Writes the file unless it exists; an existing one must have the same content. Atomic: a reader never sees a
    partial file."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
