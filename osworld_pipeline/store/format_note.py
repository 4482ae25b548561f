"""The format of a state's trajectories: one number in `format.json`, next to the manifest. Additive changes (a column
more) do not change it; a change after which an older program would read wrong or incomplete rows does."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.version import newer_format
from osworld_pipeline.errors import StoreError

NOTE = "format.json"
"""Written before the first part. A DuckDB client of the catalog needs a file with this extension, since a glob without
a match is an error."""
FORMAT = 2
"""1: parts may be of schema versions below OLDEST_READ (columns/). 2: none is."""
READ_SINCE = {1: "0.1.0", 2: "0.1.0"}
"""The first version of this program that reads each format. The note repeats it for programs that do not know the
format."""


@dataclass(frozen=True, kw_only=True)
class FormatNote:
    format: int = 1
    needs: str = ""
    """The first version of this program that reads the format; empty in notes of the first development versions."""


def read_format(root: Path) -> FormatNote:
    """The note below `root`, the folder of trajectories; format 1 without a note.

    Raises:
        StoreError: it is damaged, or a newer version wrote it and this one cannot read the state.
    """
    path = root / NOTE
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
        note = FormatNote(format=int(found["format"]), needs=str(found.get("needs", "")))
    except FileNotFoundError:
        return FormatNote()
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged ({error}): remove it, and the state is read as one of format 1") from error
    if note.format > FORMAT:
        what = f"the trajectories in {root} are"
        raise StoreError(newer_format(what, note.format, known=FORMAT, needs=note.needs))
    return note


def write_format(root: Path, number: int = FORMAT) -> None:
    """Raises StoreError."""
    write_file(root / NOTE, orjson.dumps(asdict(FormatNote(format=number, needs=READ_SINCE[number]))) + b"\n")
