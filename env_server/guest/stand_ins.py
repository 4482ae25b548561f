"""Finds what stands in for a program or library that a grader's command would run. /usr cannot be written, so there are
few places for it; what no honest program does is to put another of the same name before one of the system's."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

BEFORE = ("/usr/local/sbin", "/usr/local/bin")
"""Folders of programs that come before the system's own."""
SYSTEMS = ("/usr/sbin", "/usr/bin", "/usr/games")
LOADED = ("/etc/ld.so.preload", "/etc/ld.so.cache")
"""What the loader reads for every program."""
PACKAGES = "/usr/local/lib"
"""Python's packages that are not the system's lie below."""
RUN_BY_PYTHON = ("sitecustomize", "usercustomize")
NO_USER_PACKAGES = {"PYTHONNOUSERSITE": "1"}
"""The environment of a grader's command: the user's own packages are the policy's."""

_Stamp = tuple[int, tuple[int, int, int]]
"""Which file it is, and of what size and times; of a folder only which."""


class StandIns:
    """Compares the desktop with what it was when this was made."""

    def __init__(self) -> None:
        self._before = dict(_stamps())

    def find(self) -> str | None:
        """A sentence about the first; None where there is none."""
        for path, stamp in _stamps():
            if self._before.get(path) != stamp and (path in self._before or _is_run(Path(path))):
                return f"{path} stands in for the system's own"
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
        # What is in a folder may change: Python keeps its bytecode there.
        is_folder = stat.S_ISDIR(found.st_mode)
        content = (0, 0, 0) if is_folder else (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        yield str(path), (found.st_ino, content)


def _is_run(path: Path) -> bool:
    """Whether programs run it without being asked to."""
    folder = str(path.parent)
    if str(path) in LOADED:
        return True
    if folder in BEFORE:
        return any(os.path.exists(f"{system}/{path.name}") for system in SYSTEMS)
    return path.name.partition(".")[0] in RUN_BY_PYTHON or path.suffix == ".pth"
