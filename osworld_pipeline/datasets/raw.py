"""The raw sources of spec 01, read record by record: a source that is absent has no rows, a line that cannot be used is
a Reject with its place and reason, and memory never holds more than one record."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

__all__ = [
    "REPLAY_SOURCES",
    "TASK_SOURCES",
    "RawRecord",
    "RawTask",
    "Reject",
    "Source",
    "SourceSummary",
    "read_demonstrations",
    "read_tasks",
    "summarise_source",
]

RejectKind = Literal["malformed", "dropped_parse", "bad_image", "bad_task"]
MAX_LINE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    source: str
    path: str
    line_no: int
    task_id: str
    base_id: str
    messages: tuple[Mapping[str, Any], ...]
    """As they stand in the file: content a string or a list."""
    images: tuple[str, ...]
    """Base64 or data URIs, in the order of the placeholders."""
    reward: float | None
    """None where the record does not say."""


@dataclass(frozen=True, kw_only=True)
class RawTask:
    source: str
    path: str
    line_no: int
    base_id: str
    config: Mapping[str, Any] | None = None
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class Reject:
    source: str
    path: str
    line_no: int
    reason: str
    kind: RejectKind = "malformed"
    task_id: str = ""


class _BadRecord(Exception):
    """Why this record cannot be used; becomes a Reject."""


def read_demonstrations(state: StateDir, source: Source) -> Iterator[RawRecord | Reject]:
    """The records of a JSONL source. Raises DatasetError where the file is there and cannot be read."""
    for line_no, record in _json_lines(source.locate(state)):
        place = {"source": source.name, "path": source.path, "line_no": line_no}
        try:
            if isinstance(record, _BadRecord):
                raise record
            task_id = _task_id(record)
            yield RawRecord(
                **place,
                task_id=task_id,
                base_id=base_task_id(task_id),
                messages=_messages(record),
                images=_images(record),
                reward=_reward(record),
            )
        except _BadRecord as bad:
            yield Reject(**place, reason=str(bad))


def read_tasks(state: StateDir, source: Source) -> Iterator[RawTask | Reject]:
    """The tasks of any other source: ids, and configs where it has them. Raises DatasetError as above."""
    if source.kind == "task_tree":
        yield from _tree_tasks(source, source.locate(state))
        return
    rows = _json_lines(source.locate(state)) if source.kind == "task_ids" else _table_rows(source.locate(state))
    for line_no, record in rows:
        place = {"source": source.name, "path": source.path, "line_no": line_no}
        try:
            if isinstance(record, _BadRecord):
                raise record
            base_id = base_task_id(_task_id(record))
            config = _config(record.get("task_config")) if source.has_config else None
            domain = record.get("domain")
            yield RawTask(**place, base_id=base_id, config=config, domain=domain if isinstance(domain, str) else "")
        except _BadRecord as bad:
            yield Reject(**place, reason=str(bad))


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
    """SHA-256 of the file, or of every file of a tree; of nothing where it is absent."""

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
    """Counts what a source holds; an absent one holds nothing. Raises DatasetError where it cannot be read."""
    num_records = num_rejects = 0
    tasks: set[str] = set()
    read = read_demonstrations if source.kind == "demonstrations" else read_tasks
    for item in read(state, source):
        if isinstance(item, Reject):
            num_rejects += 1
        else:
            num_records += 1
            tasks.add(item.base_id)
    files = _files(source.locate(state))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return SourceSummary(
        source=source.name,
        path=source.path,
        is_present=bool(files),
        num_bytes=sum(path.stat().st_size for path in files),
        num_records=num_records,
        num_rejects=num_rejects,
        num_tasks=len(tasks),
        digest=digest.hexdigest(),
    )


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.json")) if path.is_dir() else [path] if path.is_file() else []


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, record or _BadRecord) of every line that is not blank."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            line_no = 0
            while line := file.readline(MAX_LINE_BYTES):
                line_no += 1
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield line_no, _BadRecord(f"a line longer than {MAX_LINE_BYTES // 2**20} MiB")
                    continue
                if not line.strip():
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    yield line_no, _BadRecord(f"not JSON: {error}")
                    continue
                yield line_no, record if isinstance(record, dict) else _BadRecord("not a JSON object")
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}; make it readable or move it away") from error


def _table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.exists():
        return
    wanted = ("task_id", "id", "metadata", "task_config", "domain")
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if not columns:
                raise DatasetError(f"{path} has none of the columns {', '.join(wanted)}: is it a task table?")
            row_no = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    row_no += 1
                    yield row_no, {name: value for name, value in row.items() if value is not None}
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"cannot read {path} as Parquet: {error}; restore it or move it away") from error


def _tree_tasks(source: Source, root: Path) -> Iterator[RawTask | Reject]:
    """Every *.json with an id and an instruction; other JSON files (indexes, data of tasks) are no tasks."""
    for path in _files(root):
        place = {"source": source.name, "path": path.relative_to(root).as_posix(), "line_no": 0}
        try:
            record = orjson.loads(path.read_bytes())
        except (orjson.JSONDecodeError, OSError) as error:
            yield Reject(**place, reason=f"not JSON: {error}")
            continue
        if isinstance(record, dict) and record.get("id") and record.get("instruction"):
            if isinstance(record["id"], str):
                base_id = base_task_id(record["id"])
                yield RawTask(**place, base_id=base_id, config=record, domain=path.parent.name)
            else:
                yield Reject(**place, reason="the id is not text")


def _task_id(record: Mapping[str, Any]) -> str:
    metadata = record.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = orjson.loads(metadata)
        except orjson.JSONDecodeError:
            metadata = None
    nested = metadata if isinstance(metadata, dict) else {}
    for found in (record.get("task_id"), record.get("id"), nested.get("task_id"), nested.get("id")):
        if found is None or found == "":
            continue
        if not isinstance(found, str):
            raise _BadRecord(f"the task id is not text but {type(found).__name__}")
        return found
    raise _BadRecord("no task id at task_id, id, metadata.task_id or metadata.id")


def _messages(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = record.get("messages") or record.get("conversations")
    if not found:
        raise _BadRecord("no messages at messages or conversations")
    if not isinstance(found, Sequence) or not all(isinstance(message, dict) for message in found):
        raise _BadRecord("the messages are not a list of objects")
    return tuple(found)


def _images(record: Mapping[str, Any]) -> tuple[str, ...]:
    found = record.get("images") or []
    if not isinstance(found, list) or not all(isinstance(image, str) for image in found):
        raise _BadRecord("the images are not a list of texts")
    return tuple(found)


def _reward(record: Mapping[str, Any]) -> float | None:
    found = record.get("reward")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise _BadRecord("the reward is not a number")
    return float(found)


def _config(found: Any) -> Mapping[str, Any] | None:
    """A config is a JSON string; an empty one says nothing."""
    if found is None or found in ("", "{}"):
        return None
    try:
        config = orjson.loads(found) if isinstance(found, str) else found
    except orjson.JSONDecodeError as error:
        raise _BadRecord(f"the task_config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _BadRecord("the task_config is not a JSON object")
    return config or None
