"""The replay buffer: every demonstration whose turns all parse, in one form, once; and how a trainer reads it back."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.columns import REPLAY_BUFFER
from osworld_pipeline.datasets.normalize import decode_image, messages_sha1, normalise_messages, num_images, text_of
from osworld_pipeline.datasets.raw import REPLAY_SOURCES, RawRecord, Reject, RejectKind, read_demonstrations
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import ActionParseError, DatasetError, TableError
from osworld_pipeline.tables.owned import read_table
from osworld_pipeline.trajectories import BlobStore

ASSUMED_REWARD = 1.0
"""Of a demonstration that does not say; the row says that it was assumed."""
SUCCESS_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class ReplayBuild:
    table: pa.Table
    rejects: tuple[Reject, ...]
    task_ids: frozenset[str]
    """Base ids of every record that could be read, kept or not."""
    num_records: Mapping[str, int]
    """Records that could be read, by source."""
    stats: Mapping[str, Any]


def build_replay(state: StateDir, *, system_prompt: str, dialect: str) -> ReplayBuild:
    """Reads the six sources once, best first, so that of equal demonstrations the best one stays; images go to the blob
    store as they come, and memory holds text only.

    Raises:
        DatasetError: a source is there and cannot be read.
        StoreError: an image cannot be stored.
    """
    parser = load_dialect(dialect)
    blobs = BlobStore(state.blobs)
    blobs.remove_stale_temps()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    rejects: list[Reject] = []
    counts: Counter[str] = Counter()
    num_records: Counter[str] = Counter()
    task_ids: set[str] = set()
    for source in sorted(REPLAY_SOURCES, key=lambda source: -source.quality_rank):
        for record in read_demonstrations(state, source):
            if isinstance(record, Reject):
                rejects.append(record)
                continue
            num_records[source.name] += 1
            task_ids.add(record.base_id)
            try:
                messages = normalise_messages(record.messages, system_prompt=system_prompt)
                for message in messages:
                    if message["role"] == "assistant":
                        parser.parse_strict(text_of(message))
            except DatasetError as error:
                rejects.append(_reject(record, "malformed", str(error)))
                continue
            except ActionParseError as error:
                counts["dropped_parse"] += 1
                rejects.append(_reject(record, "dropped_parse", str(error)))
                continue
            key = (record.base_id, messages_sha1(messages))
            if key in rows:
                counts["deduped"] += 1
                continue
            try:
                images = _store_images(blobs, record, num_images(messages))
            except DatasetError as error:
                rejects.append(_reject(record, "bad_image", str(error)))
                continue
            rows[key] = _row(record, source.quality_rank, messages, images)
    ordered = sorted(rows.values(), key=lambda row: (row["task_id"], row["original_task_id"], row["row_id"]))
    stats = {
        "input_samples": num_records.total(),
        "kept_samples": len(ordered),
        "dropped_parse": counts["dropped_parse"],
        "deduped": counts["deduped"],
        "per_dataset": dict(Counter(row["source_dataset"] for row in ordered)),
    }
    return ReplayBuild(
        table=pa.Table.from_pylist(ordered, schema=REPLAY_BUFFER),
        rejects=tuple(rejects),
        task_ids=frozenset(task_ids),
        num_records=num_records,
        stats=stats,
    )


def load_replay_rows(state: StateDir, *, min_reward: float = SUCCESS_THRESHOLD) -> list[ReplayRow]:
    """The rows of the replay buffer that were successes, in a fixed order; read from the table's file, never locked.

    Raises:
        TableError: the replay buffer has not been built.
    """
    table = read_table(state, "replay_buffer")
    if table.num_rows == 0:
        raise TableError(f"the replay buffer in {state.tables} is empty: materialize replay_buffer first")
    return [
        ReplayRow(
            row_id=row["row_id"],
            task_id=row["task_id"],
            original_task_id=row["original_task_id"],
            source_dataset=row["source_dataset"],
            reward=row["reward"],
            messages=tuple(
                {"role": message["role"], "content": [_part(part) for part in message["content"]]}
                for message in row["messages"]
            ),
            image_sha256s=tuple(row["images"]),
        )
        for row in table.to_pylist()
        if row["reward"] >= min_reward
    ]


def _part(part: Mapping[str, Any]) -> dict[str, str]:
    return {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}


def _store_images(blobs: BlobStore, record: RawRecord, num_placeholders: int) -> list[str]:
    if len(record.images) != num_placeholders:
        raise DatasetError(f"{num_placeholders} image placeholders, {len(record.images)} images")
    decoded = []
    for index, text in enumerate(record.images):
        try:
            decoded.append(decode_image(text))
        except DatasetError as error:
            raise DatasetError(f"image {index}: {error}") from error
    # Only a record whose images are all good may leave anything in the store.
    return [blobs.write(data, suffix=suffix) for data, suffix in decoded]


def _row(
    record: RawRecord, quality_rank: int, messages: Sequence[Mapping[str, Any]], images: Sequence[str]
) -> dict[str, Any]:
    return {
        "row_id": digest_json({"task_id": record.base_id, "messages": list(messages)})[:24],
        "task_id": record.base_id,
        "original_task_id": record.task_id,
        "source_dataset": record.source,
        "quality_rank": quality_rank,
        "reward": ASSUMED_REWARD if record.reward is None else record.reward,
        "is_reward_assumed": record.reward is None,
        "num_steps": sum(message["role"] == "assistant" for message in messages),
        "messages": list(messages),
        "images": list(images),
        "source_path": record.path,
        "source_line": record.line_no,
    }


def _reject(record: RawRecord, kind: RejectKind, reason: str) -> Reject:
    return Reject(
        source=record.source,
        path=record.path,
        line_no=record.line_no,
        kind=kind,
        reason=reason,
        task_id=record.task_id,
    )
