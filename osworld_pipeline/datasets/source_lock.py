"""`sources.lock.json`, next to the raw sources, pins each downloaded file to a revision and a content."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.errors import DatasetError

LOCK_FILE = "sources.lock.json"


@dataclass(frozen=True, kw_only=True)
class SourceLock:
    """One downloaded file."""

    source: str
    """A name of sources.py."""
    repo_id: str
    filename: str
    """Path in the repository."""
    revision: str
    """The commit it was resolved to, 40 hexadecimal digits."""
    requested: str
    """The branch, tag or commit that was asked for."""
    sha256: str
    num_bytes: int
    licence: str = ""
    """The licence in the dataset's card; empty if the card has none."""


_LOCKS = TypeAdapter(dict[str, SourceLock])


def read_source_lock(datasets_root: Path) -> Mapping[str, SourceLock]:
    """The locks of a datasets folder by source name; empty if nothing was downloaded.

    Raises:
        DatasetError: the lock file exists and cannot be read.
    """
    path = datasets_root / LOCK_FILE
    try:
        return _LOCKS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        why = (
            (error.strerror or str(error))
            if isinstance(error, OSError)
            else f"validation errors: {error.error_count()}"
        )
        raise DatasetError(
            f"cannot read the lock file {path} ({why}): restore it, or remove it and fetch again"
        ) from error


def write_source_lock(datasets_root: Path, locks: Mapping[str, SourceLock]) -> None:
    """Replaces the lock file as a whole. Raises StoreError."""
    document = {name: asdict(locks[name]) for name in sorted(locks)}
    write_file(datasets_root / LOCK_FILE, orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
