"""`remote/note.json` in a state folder: the object store that it is pushed to, or is a cache of."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import orjson

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.errors import StoreError

FOLDER = "remote"
NOTE = "note.json"


@dataclass(frozen=True, kw_only=True)
class RemoteNote:
    url: str
    role: Literal["origin", "cache"]
    """`cache`: missing files are fetched."""


def read_note(root: Path) -> RemoteNote | None:
    """The note of a state folder; None if it belongs to no object store. Raises StoreError if it is damaged."""
    path = root / FOLDER / NOTE
    try:
        status = path.stat()
    except OSError:
        return None
    return _read(path, status.st_mtime_ns)


def is_cache(root: Path) -> bool:
    """Whether a state folder is the cache of an object store. The files on the object store are then changed by another
    folder, the origin. Raises StoreError if the note is damaged."""
    note = read_note(root)
    return note is not None and note.role == "cache"


@lru_cache(maxsize=64)
def _read(path: Path, changed_ns: int) -> RemoteNote:
    try:
        found = orjson.loads(path.read_bytes())
        return RemoteNote(url=found["url"], role=found["role"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it, and push or pull again") from error


def write_note(root: Path, note: RemoteNote) -> None:
    """Raises StoreError."""
    write_file(root / FOLDER / NOTE, orjson.dumps(asdict(note)))
