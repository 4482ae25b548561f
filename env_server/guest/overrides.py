"""Detects files that override the system's programs and libraries when a grader's command runs. /usr is read-only, so
only a few places precede it in a search path. A new program is allowed; one that shadows a system program is not."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

BEFORE = ("/usr/local/sbin", "/usr/local/bin")
"""Folders that precede the system's in PATH."""
SYSTEMS = ("/usr/sbin", "/usr/bin", "/usr/games")
LOADED = ("/etc/ld.so.preload", "/etc/ld.so.cache")
"""Files that the loader reads for every program."""
PACKAGES = "/usr/local/lib"
"""Contains the Python packages that are not the system's."""
RUN_BY_PYTHON = ("sitecustomize", "usercustomize")
NO_USER_PACKAGES = {"PYTHONNOUSERSITE": "1"}
"""The environment of a grader's command: packages of the user may be the policy's."""

_Stamp = tuple[int, tuple[int, int, int]]
"""Inode; and size, mtime and ctime, which are 0 for a folder."""


class Overrides:
    """Compares the desktop with its state at creation of this object."""

    def __init__(self) -> None:
        self._before = dict(_stamps())

    def find(self) -> str | None:
        """One sentence about the first override; None without one."""
        for path, stamp in _stamps():
            if self._before.get(path) != stamp and (path in self._before or _is_run(Path(path))):
                return f"{path} overrides the system's own"
        return None


def _stamps() -> Iterator[tuple[str, _Stamp]]:
    paths = [Path(path) for path in LOADED]
    for folder in (*BEFORE, *(str(path) for path in Path(PACKAGES).glob("python3*/*-packages"))):
        paths += sorted(Path(folder).iterdir()) if os.path.isdir(folder) else []
    for path in paths:
        try:
            found = os.lstat(path)
        except OSError:
            continue
        # A folder's content may change: Python writes bytecode there.
        is_folder = stat.S_ISDIR(found.st_mode)
        content = (0, 0, 0) if is_folder else (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        yield str(path), (found.st_ino, content)


def _is_run(path: Path) -> bool:
    """Whether existing commands would load or run it."""
    folder = str(path.parent)
    if str(path) in LOADED:
        return True
    if folder in BEFORE:
        return any(os.path.exists(f"{system}/{path.name}") for system in SYSTEMS)
    return path.name.partition(".")[0] in RUN_BY_PYTHON or path.suffix == ".pth"
