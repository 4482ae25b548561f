"""Windows paths on a desktop that runs Windows programs: `C:\\Users\\user\\a.txt` is a file below ~/.wine, matched
without regard to letter case."""

import os
import re
from pathlib import Path

DRIVES = ".wine/dosdevices"
"""A folder in the home folder, with a link for each drive, as Wine creates them."""
_WINDOWS_PATH = re.compile(r"([A-Za-z]):[\\/](.*)", re.DOTALL)


def is_windows_path(text: str) -> bool:
    return _WINDOWS_PATH.fullmatch(text) is not None


def unix_path(text: str, home: Path) -> Path:
    """The Unix path of a Windows path. Existing names match in any letter case; other names are kept as written. A
    drive that does not exist gives a path that does not exist. ValueError if it is not a Windows path or has `..`."""
    found = _WINDOWS_PATH.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a Windows path")
    parts = [part for part in re.split(r"[\\/]+", found[2]) if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"the Windows path {text!r} must not contain '..'")
    path = Path(os.path.realpath(home / DRIVES / f"{found[1].lower()}:"))
    for part in parts:
        path /= _name_in(path, part)
    return path


def _name_in(folder: Path, name: str) -> str:
    """The entry with that name; of several, the one with exactly this letter case."""
    try:
        names = os.listdir(folder)
    except OSError:
        return name
    if name in names:
        return name
    return min((entry for entry in names if entry.casefold() == name.casefold()), default=name)
