"""What is built once and used by many processes: locks, whole files, and the removal of what is not needed any more."""

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
    """One process at a time; the lock of a killed process is free."""
    with path.open("a") as file:
        until = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DependencyError(
                        f"another process has held {path} for {limit_s:g} s; end it, or wait for it"
                    ) from None
                time.sleep(_POLL_S)
        yield


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Removes the others: what an older recipe, agent or QEMU made. A machine that still runs on it keeps its files."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[count:]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """What a killed builder left; to be called with its lock held."""
    for path in folder.glob(f"{prefix}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def make_readable(folder: Path) -> None:
    """For any user who may pass through the folders above, under any umask."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def write_whole(path: Path, data: bytes) -> None:
    """Nobody ever reads half of it; a file that is there already is the same."""
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
