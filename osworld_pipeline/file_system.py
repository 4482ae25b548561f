"""Checks that the file system of a state folder supports what the store needs: atomic renames, and locks that exclude
other processes, or hard links for lock files."""

import errno
import fcntl
import os
from functools import lru_cache
from pathlib import Path

from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import MARKER, uses_lock_files
from osworld_pipeline.temp_names import temp_name

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of `flock` on a file system without locks."""
OF_STATES = ("trajectories", "tables", "checkpoints", "blobs")
"""If one of these folders exists, the state is not new, and other processes may use it with another kind of lock."""
_OCTAL = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


@lru_cache(maxsize=64)
def need_file_system(folder: Path) -> None:
    """Checks, once per process, that a state can be written in `folder`. A new state on a file system without locks
    gets lock files.

    Raises:
        StoreError: `folder` cannot be written, its locks do not work, or a file cannot be renamed over another.
    """
    temp, target = folder / temp_name(), folder / temp_name()
    try:
        temp.touch()
        if not uses_lock_files(folder.absolute()):
            _need_locks(folder, temp)
        if uses_lock_files(folder.absolute()):
            _need_links(folder, temp, target)
        target.touch()
        os.replace(temp, target)
    except OSError as error:
        raise StoreError(_explain(folder, error)) from error
    finally:
        for path in (temp, target):
            _remove(path)


def local_locks(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The mount option that limits locks on `folder` to this host; empty if there is none."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    folder = folder.resolve()
    found = [(Path(_plain(row[1])), row[2], row[3].split(",")) for row in rows if len(row) >= 4]
    of_folder = [entry for entry in found if folder.is_relative_to(entry[0])]
    if not of_folder:
        return ""
    _, kind, options = max(reversed(of_folder), key=lambda entry: len(entry[0].parts))
    local_options = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "localflocks", "nobrl")
    return next((name for name in local_options if name in options), "") if kind not in ("ext4", "xfs", "tmpfs") else ""


def explain_lock(path: Path, error: OSError) -> str:
    """One sentence about a lock that failed for a reason other than another holder."""
    if error.errno in NO_LOCKS:
        return (
            f"the file system of {path} has no locks (flock: {error.strerror}): keep the state on a local disk or on "
            f"NFS 4 without the options nolock and local_lock; or create the empty file {MARKER} in the state folder "
            "while no process of any host uses it"
        )
    return f"cannot lock {path} ({error.strerror or error}): remove the cause, and run again"


def _need_locks(folder: Path, temp: Path) -> None:
    # Both are opened for writing: NFS grants an exclusive lock only to a descriptor that is open for writing.
    with temp.open("wb") as first, temp.open("r+b") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in NO_LOCKS or any((folder / name).exists() for name in OF_STATES):
                raise StoreError(explain_lock(folder, error)) from error
            (folder / MARKER).touch()
            uses_lock_files.cache_clear()
            return
    raise StoreError(
        f"the file system of {folder} grants one lock to two holders: keep the state on a local disk, or on NFS 4; or "
        f"create the empty file {MARKER} in the state folder while no process of any host uses it"
    )


def _need_links(folder: Path, temp: Path, other: Path) -> None:
    """Lock files are made by hard links."""
    try:
        os.link(temp, other)
    except OSError as error:
        raise StoreError(
            f"the file system of {folder} has neither locks nor hard links ({error.strerror}): choose another folder"
        ) from error


def _explain(folder: Path, error: OSError) -> str:
    if error.errno == errno.EROFS:
        return f"the file system of {folder} is read-only: run the pipeline in another folder; queries work here"
    if isinstance(error, PermissionError):
        return f"{folder} cannot be written by this user: make it writable, or choose another state folder"
    return f"{folder} cannot hold a state ({error.strerror or error}): choose a folder on another file system"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # it could not be created, or is removed later as a stale temporary file


def _plain(name: str) -> str:
    for code, character in _OCTAL.items():
        name = name.replace(code, character)
    return name
