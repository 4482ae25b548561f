"""Rows of the replay table, made in the worker: messages in one form, images in the blob store, columns as an Arrow
stream. Separate from forms.py, because the artefact needs no Arrow."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
import pyarrow as pa

from osworld_pipeline.columns import REPLAY_BUFFER
from osworld_pipeline.datasets.normalize import Message, normalise_messages, num_images, text_of
from osworld_pipeline.datasets.records import images_of, messages_of, reward_of
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.datasets.union.forms import (
    ASSUMED_REWARD,
    CACHED_TURNS,
    KEY_BYTES,
    Candidate,
    Examined,
    Origin,
    Setup,
    checked_images,
    row_id_of,
)
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.errors import ActionParseError, DatasetError
from osworld_pipeline.store.blobs import BlobStore


@dataclass(frozen=True, kw_only=True)
class Row:
    messages: Sequence[Message]
    action_types: Sequence[str]
    images: Sequence[tuple[bytes, str]]
    """Bytes and suffix."""
    reward: float | None
    row_id: str
    former_row_id: str
    line_sha256: str
    source_path: str | None
    source_line: int | None
    """With `source_path` the record's original place; both are None unless the record is from an import."""


class TableForm:
    def __init__(self, setup: Setup) -> None:
        assert setup.blobs is not None, "table rows keep their images in a blob store"
        self._system_prompt = setup.system_prompt
        self._dialect = load_dialect(setup.dialect)
        self._blobs = BlobStore(setup.blobs)
        self._action_type = lru_cache(CACHED_TURNS)(lambda text: self._dialect.parse_strict(text).action_type)

    def examine(self, record: Mapping[str, Any], line: bytes, task_id: str, origin: Origin) -> Examined:
        images, reward = images_of(record), reward_of(record)
        try:
            messages = normalise_messages(messages_of(record), system_prompt=self._system_prompt)
            types = [self._action_type(text_of(turn)) for turn in messages if turn["role"] == "assistant"]
        except DatasetError as error:
            raise BadRecord(str(error)) from None
        except ActionParseError as error:
            raise BadRecord(str(error), kind="dropped_parse") from None
        pictures = list(checked_images(images, num_images(messages), origin.folder))
        digest = _digest(task_id, messages[1:], images=[digest_bytes(data) for data, _ in pictures])
        path, line_no = (record.get("source_path"), record.get("source_line")) if origin.is_import else (None, None)
        row = Row(
            messages=messages,
            action_types=types,
            images=pictures,
            reward=reward,
            row_id=row_id_of(digest),
            former_row_id=row_id_of(_digest(task_id, messages)),
            line_sha256=hashlib.sha256(line).hexdigest(),
            source_path=path if isinstance(path, str) else None,
            source_line=line_no if isinstance(line_no, int) else None,
        )
        return digest[:KEY_BYTES], row, reward

    def write(self, candidates: list[Candidate], origin: Origin, first_line: int) -> bytes:
        rows = []
        candidates.reverse()
        while candidates:
            rows.append(self._fields(candidates.pop(), origin, first_line))
        batch = pa.RecordBatch.from_pylist(rows, schema=REPLAY_BUFFER)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, REPLAY_BUFFER) as writer:
            writer.write_batch(batch)
        return sink.getvalue().to_pybytes()

    def _fields(self, candidate: Candidate, origin: Origin, first_line: int) -> dict[str, Any]:
        row: Row = candidate.content
        return {
            "row_id": row.row_id,
            "task_id": candidate.base_id,
            "original_task_id": candidate.task_id,
            "source_dataset": origin.source,
            "quality_rank": origin.quality_rank,
            "reward": ASSUMED_REWARD if row.reward is None else row.reward,
            "is_reward_assumed": row.reward is None,
            "num_steps": len(row.action_types),
            "messages": row.messages,
            "images": self._blobs.write_many(row.images) if row.images else [],
            "dialect": self._dialect.name,
            "action_types": row.action_types,
            "licence": origin.licence or None,
            "source_path": row.source_path or origin.path,
            "source_line": first_line + candidate.line_no if row.source_line is None else row.source_line,
            "source_sha256": row.line_sha256,
            "former_row_id": row.former_row_id,
        }


def _digest(task_id: str, messages: Sequence[Message], **more: Sequence[str]) -> bytes:
    """Digest of the same bytes as the canonical JSON of domain.digest, since all values are strings."""
    value = {"task_id": base_task_id(task_id), "messages": messages, **more}
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()
