"""Windows paths on a desktop that runs Windows programs: `C:\\Users\\user\\a.txt` is a file below ~/.wine, in whatever
letter case it is written."""

import os
import re
from pathlib import Path

DRIVES = ".wine/dosdevices"
"""Below the home folder: a link for each drive, as Wine keeps them."""
_WINDOWS_PATH = re.compile(r"([A-Za-z]):[\\/](.*)", re.DOTALL)


def is_windows_path(text: str) -> bool:
    return _WINDOWS_PATH.fullmatch(text) is not None


def unix_path(text: str, home: Path) -> Path:
    """Where a Windows path leads. What is there is found in any letter case; the rest stands as it is written. A drive
    that is not there leads to a folder that is not there. ValueError where the path is none, or climbs out by `..`."""
    found = _WINDOWS_PATH.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no Windows path")
    parts = [part for part in re.split(r"[\\/]+", found[2]) if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"the Windows path {text!r} climbs out of its folder")
    path = Path(os.path.realpath(home / DRIVES / f"{found[1].lower()}:"))
    for part in parts:
        path /= _name_in(path, part)
    return path


def _name_in(folder: Path, name: str) -> str:
    """The entry of that name, of several the one in just this letter case."""
    try:
        names = os.listdir(folder)
    except OSError:
        return name
    if name in names:
        return name
    return min((entry for entry in names if entry.casefold() == name.casefold()), default=name)
