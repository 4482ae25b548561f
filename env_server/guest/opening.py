"""Finds the program that opens a file, from the desktop's own associations, without a shell script in between."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import shlex
from pathlib import Path

_TEXT = "text/plain"


def opening_command(path: Path) -> list[str]:
    """The command line that opens `path`; a file of an unknown type is opened as text."""
    from gi.repository import Gio

    kind = "inode/directory" if path.is_dir() else Gio.content_type_guess(path.name, None)[0]
    program = Gio.AppInfo.get_default_for_type(kind, False) or Gio.AppInfo.get_default_for_type(_TEXT, False)
    if program is None:
        return ["xdg-open", str(path)]
    return expand_command(program.get_commandline(), path)


def expand_command(line: str, path: Path) -> list[str]:
    """The Exec line of a desktop entry with its field codes replaced: %f and %F by the path, %u and %U by its URI, the
    others dropped. The path is appended if none of these is there."""
    words, is_placed = [], False
    for word in shlex.split(line):
        if word in ("%f", "%F", "%u", "%U"):
            words.append(path.absolute().as_uri() if word in ("%u", "%U") else str(path))
            is_placed = True
        elif not (len(word) == 2 and word.startswith("%")):
            words.append(word.replace("%%", "%"))
    return words if is_placed else [*words, str(path)]
