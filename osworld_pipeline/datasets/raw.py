"""Slime-OSWorld's raw sources, read record by record: an absent source has no rows, an unusable line is a Reject with
its place and reason, and memory holds at most one block of lines."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.datasets.lines import MAX_LINE_BYTES, find_file, lines_of, read_blocks, size_of, too_long
from osworld_pipeline.datasets.records import (
    config_of,
    images_of,
    messages_of,
    read_exactly,
    read_object,
    reward_of,
    task_id_of,
)
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.datasets.rejects import BadRecord, Reject, RejectKind
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.domain.state import StateDir

__all__ = [
    "REPLAY_SOURCES",
    "TASK_SOURCES",
    "RawRecord",
    "RawTask",
    "Reject",
    "RejectKind",
    "Source",
    "SourceSummary",
    "digest_files",
    "file_sha256",
    "read_demonstrations",
    "read_tasks",
    "read_tasks_at",
    "source_files",
    "summarise_source",
]

NO_FILE = "the path is a folder, not a file: put the file there, or remove the folder"


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    source: str
    path: str
    line_no: int
    task_id: str
    base_id: str
    messages: tuple[Mapping[str, Any], ...]
    """The messages of the file: content is a string or a list."""
    images: tuple[str, ...]
    """Base64, data URIs or paths relative to the source, in the order of the placeholders."""
    reward: float | None
    """None if the record has none."""


@dataclass(frozen=True, kw_only=True)
class RawTask:
    source: str
    path: str
    line_no: int
    base_id: str
    config: Mapping[str, Any] | None = None
    """None if the source has none; keys in the order of the source."""
    domain: str = ""
    instruction: str = ""
    """The instruction, if the source has it outside the config."""


def read_demonstrations(state: StateDir, source: Source) -> Iterator[RawRecord | Reject]:
    """The records of a JSONL source; images are not checked."""
    for line_no, record in _json_lines(source.locate(state)):
        place = {"source": source.name, "path": source.path, "line_no": line_no}
        try:
            if isinstance(record, BadRecord):
                raise record
            task_id = task_id_of(record)
            yield RawRecord(
                **place,
                task_id=task_id,
                base_id=base_task_id(task_id),
                messages=tuple(messages_of(record)),
                images=tuple(images_of(record)),
                reward=reward_of(record),
            )
        except BadRecord as bad:
            yield Reject(**place, kind=bad.kind, reason=bad.reason)


def read_tasks(state: StateDir, source: Source) -> Iterator[RawTask | Reject]:
    """The tasks of a source that is not of demonstrations: ids, and configs if the source has them."""
    return read_tasks_at(source, source.locate(state))


def read_tasks_at(source: Source, path: Path) -> Iterator[RawTask | Reject]:
    """The same for a source at `path`. A row with a readable id counts even if its config is rejected."""
    if source.kind == "task_tree":
        yield from _tree_tasks(source, path)
        return
    if path.is_dir():
        yield Reject(source=source.name, path=source.path, line_no=0, kind="unreadable", reason=NO_FILE)
        return
    rows = _table_rows(path) if source.kind == "task_table" else _json_lines(path, is_exact=source.has_config)
    for line_no, record in rows:
        place = {"source": source.name, "path": source.path, "line_no": line_no}
        base_id = ""
        try:
            if isinstance(record, BadRecord):
                raise record
            base_id = base_task_id(task_id_of(record))
            config = config_of(record.get("task_config")) if source.has_config else None
            yield RawTask(
                **place,
                base_id=base_id,
                config=config,
                domain=_text(record.get("domain")),
                instruction=_text(record.get("instruction")),
            )
        except BadRecord as bad:
            yield Reject(**place, kind=bad.kind, reason=bad.reason, task_id=base_id)
            if base_id:
                yield RawTask(**place, base_id=base_id)


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    source: str
    path: str
    is_present: bool
    num_bytes: int
    num_records: int
    num_rejects: int
    num_tasks: int
    digest: str
    """`digest_files` of the source's files, or of no files if it is absent."""

    def metadata(self) -> dict[str, Any]:
        return {
            "present": self.is_present,
            "records": self.num_records,
            "rejected": self.num_rejects,
            "tasks": self.num_tasks,
            "bytes": self.num_bytes,
            "path": self.path,
        }


def summarise_source(state: StateDir, source: Source) -> SourceSummary:
    """Counts the records of a source; an absent one has none. Raises OSError if a JSONL file disappears meanwhile."""
    num_records = num_rejects = 0
    tasks: set[str] = set()
    read = read_demonstrations if source.kind == "demonstrations" else read_tasks
    for item in read(state, source):
        if isinstance(item, Reject):
            num_rejects += 1
        else:
            num_records += 1
            tasks.add(item.base_id)
    files = source_files(source.locate(state))
    return SourceSummary(
        source=source.name,
        path=source.path,
        is_present=bool(files),
        num_bytes=sum(map(size_of, files)),
        num_records=num_records,
        num_rejects=num_rejects,
        num_tasks=len(tasks),
        digest=digest_files(files),
    )


def source_files(path: Path) -> list[Path]:
    """The files of a source at `path`: the JSON files of a tree, else the file or its compressed form."""
    if path.is_dir():
        return sorted(found for found in path.rglob("*.json") if found.is_file())
    found = find_file(path)
    return [found] if found else []


def file_sha256(files: Sequence[Path]) -> str:
    """SHA-256 of the one file; of a tree, digest_files. Raises OSError if the file cannot be read."""
    if len(files) != 1:
        return digest_files(files)
    with files[0].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(files: Sequence[Path]) -> str:
    """SHA-256 over name, size and content of each; an unreadable file counts by name and size only."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{size_of(path)}\0".encode(errors="surrogateescape"))
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            continue
    return digest.hexdigest()


def _json_lines(path: Path, *, is_exact: bool = False) -> Iterator[tuple[int, Any]]:
    """(line number, record or BadRecord) of every line that is not blank. `is_exact`: as read_exactly."""
    found = find_file(path)
    if found is None:
        return
    first = 0
    for block in read_blocks(found):
        if block.fault == "too_long":
            first += 1
            yield first, BadRecord(too_long(MAX_LINE_BYTES), kind="too_long")
            continue
        if block.fault:
            yield 0, BadRecord(block.reason, kind="unreadable")
            continue
        number = 0
        for number, line in lines_of(block.read()):
            if line and not line.isspace():
                try:
                    yield first + number, read_object(line, exactly=is_exact)
                except BadRecord as bad:
                    yield first + number, bad
        first += number


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.exists():
        return
    wanted = ("task_id", "id", "metadata", "task_config", "domain", "instruction")
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if not columns:
                yield 0, BadRecord(f"none of the columns {', '.join(wanted)}: is it a task table?", kind="unreadable")
                return
            row_no = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    row_no += 1
                    yield row_no, {name: value for name, value in row.items() if value is not None}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield 0, BadRecord(f"cannot be read as Parquet: {error}", kind="unreadable")


def _tree_tasks(source: Source, root: Path) -> Iterator[RawTask | Reject]:
    """Every *.json with an id and an instruction; other JSON files (indexes, data of tasks) are skipped."""
    for path in source_files(root) if root.is_dir() else []:
        place = {"source": source.name, "path": path.relative_to(root).as_posix(), "line_no": 0}
        if path.name == "test_all.json":
            continue
        try:
            record = read_exactly(read_regular_file(path).removeprefix(b"\xef\xbb\xbf"))
        except BadRecord as bad:
            yield Reject(**place, reason=bad.reason)
            continue
        except OSError as error:
            yield Reject(**place, kind="unreadable", reason=f"cannot be read: {error.strerror or error}")
            continue
        if isinstance(record, dict) and record.get("id") and record.get("instruction"):
            if isinstance(record["id"], str):
                base_id = base_task_id(record["id"])
                yield RawTask(**place, base_id=base_id, config=record, domain=path.parent.name)
            else:
                yield Reject(**place, reason="the id is not text")
