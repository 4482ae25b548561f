"""Summaries of the raw sources. A source is read again only if the name, size or modification time of a file, or the
code that reads it (READERS), has changed, because hashing 100 GB on each check would take minutes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from osworld_pipeline.atomic_io import remove_stale_temps, write_file
from osworld_pipeline.datasets.raw import (
    Reject,
    Source,
    digest_files,
    read_demonstrations,
    read_tasks,
    source_files,
)
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.runs.code_version import code_version

FOLDER = "raw_sources"
"""A folder in the tables' folder: one file for each source, so that concurrent writers do not conflict."""
READERS = ("osworld_pipeline.datasets", "osworld_pipeline.datasets.union", "osworld_pipeline.domain.replay")
"""The modules that determine how many records are found."""
NUM_REJECTS_KEPT = 10


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """A raw source on disk."""

    source: str
    path: str
    digest: str
    """Digest of its content, or of no content if it is missing."""
    is_present: bool
    num_bytes: int
    num_records: int
    num_rejects: int
    num_tasks: int
    rejects: tuple[tuple[str, int, str, str], ...]
    """The first ones: file, line (0 for a whole file), kind and reason."""
    is_cached: bool = False
    """Nothing was read, because nothing has changed."""


def look_at_source(state: StateDir, source: Source) -> SourceState:
    """Reads the source if it has changed since the last call.

    Raises:
        DatasetError: it exists and cannot be read.
    """
    path = state.tables / FOLDER / f"{source.name}.json"
    fingerprint = digest_json({"files": _stamps(source.locate(state)), "code": code_version(*READERS)})
    known = _read(path)
    if known is not None and known["fingerprint"] == fingerprint:
        return _state_from(known["source"], is_cached=True)
    found = _look(state, source)
    fields = {name: value for name, value in asdict(found).items() if name != "is_cached"}
    remove_stale_temps(path.parent)
    write_file(path, json.dumps({"fingerprint": fingerprint, "source": fields}).encode())
    return found


@dataclass(frozen=True, kw_only=True)
class ImportsState:
    """Summary of all imports."""

    digest: str
    num_demonstrations: int
    num_rejects: int
    rows: tuple[tuple[Any, ...], ...]
    """A row for each import: name, importer, demonstrations, tasks, rejects, licence, revision, origin."""
    rejects: tuple[tuple[str, int, str, str], ...]
    """The first ones: file, line, kind and reason."""


def look_at_imports(state: StateDir) -> ImportsState:
    """Reads the notes of the importers.

    Raises:
        DatasetError: a note is damaged.
    """
    notes: list[dict[str, Any]] = []
    rejects: list[tuple[str, int, str, str]] = []
    for path in sorted(state.imports.glob("[a-z0-9_]*/source.json")):
        try:
            notes.append({"name": path.parent.name, **json.loads(path.read_bytes())})
            rejects += _import_rejects(path.with_name("rejects.jsonl"), limit=NUM_REJECTS_KEPT - len(rejects))
        except (ValueError, KeyError) as error:
            raise DatasetError(f"{path.parent} is damaged ({error}): import it again, or remove the folder") from error
    keys = ("name", "importer", "num_demonstrations", "num_tasks", "num_rejects", "licence", "revision", "origin")
    return ImportsState(
        digest=digest_json(notes),
        num_demonstrations=sum(note.get("num_demonstrations", 0) for note in notes),
        num_rejects=sum(note.get("num_rejects", 0) for note in notes),
        rows=tuple(tuple(note.get(key) for key in keys) for note in notes),
        rejects=tuple(rejects),
    )


def _import_rejects(path: Path, *, limit: int) -> list[tuple[str, int, str, str]]:
    if limit <= 0 or not path.is_file():
        return []
    with path.open() as file:
        rows = [json.loads(line) for line in islice(file, limit)]
    return [(row["path"], row["line"], row["kind"], row["reason"]) for row in rows]


def _look(state: StateDir, source: Source) -> SourceState:
    num_records, tasks = 0, set[str]()
    num_rejects, first_rejects = 0, list[Reject]()
    read = read_demonstrations if source.kind == "demonstrations" else read_tasks
    for item in read(state, source):
        if isinstance(item, Reject):
            num_rejects += 1
            first_rejects += [item] if num_rejects <= NUM_REJECTS_KEPT else []
        else:
            num_records += 1
            tasks.add(item.base_id)
    files = source_files(source.locate(state))
    return SourceState(
        source=source.name,
        path=source.path,
        digest=digest_files(files),
        is_present=bool(files),
        num_bytes=sum(path.stat().st_size for path in files),
        num_records=num_records,
        num_rejects=num_rejects,
        num_tasks=len(tasks),
        rejects=tuple((reject.path, reject.line_no, str(reject.kind), reject.reason) for reject in first_rejects),
    )


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and modification time of every file that may belong to the source, including compressed files."""
    if path.is_dir():
        return _stamps_of(path, path.rglob("*.json"))
    return _stamps_of(path.parent, path.parent.glob(f"{path.name}*"))


def _stamps_of(root: Path, paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    found = [(path.relative_to(root).as_posix(), path.stat()) for path in sorted(paths) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _state_from(fields: Mapping[str, Any], *, is_cached: bool) -> SourceState:
    rejects = tuple((str(place), int(line), str(kind), str(why)) for place, line, kind, why in fields["rejects"])
    return SourceState(**{**fields, "rejects": rejects}, is_cached=is_cached)
