"""Slime-OSWorld's replay JSONL (osworld_replay_train.jsonl) as demonstrations: each row keeps its reward,
its chunk's id and the dataset it once came from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.datasets.images import load_image
from osworld_pipeline.datasets.importers.folder import ImportOptions, ImportSummary, ImportWriter, open_import, publish
from osworld_pipeline.datasets.importers.images import ProvenImage, prove_image
from osworld_pipeline.datasets.importers.lines import Line, OnProgress, read_lines
from osworld_pipeline.datasets.importers.turns import SYSTEM_PROMPT
from osworld_pipeline.datasets.normalize import Message, normalise_messages, num_images, text_of
from osworld_pipeline.datasets.records import images_of, messages_of, reward_of, task_id_of
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import ActionParseError, DatasetError

IMPORTER = "slime-replay"
DIALECT = "slime"


def import_slime_replay(
    state: StateDir, path: Path, options: ImportOptions, *, on_progress: OnProgress | None = None
) -> ImportSummary:
    """`path`: the JSONL file; images are base64, data URIs or paths relative to it.

    Raises:
        DatasetError: no such file, bad options, or another import runs.
        StoreError: the file system refused.
    """
    if not path.is_file():
        raise DatasetError(f"no file {path}: give the replay JSONL of a union build")
    with open_import(state, importer=IMPORTER, origin=str(path), options=options) as writer:
        for line in read_lines(path, on_progress):
            _import_line(writer, line, path)
        summary = writer.finish(num_episodes=0)
        publish(state, writer)
    return summary


def _import_line(writer: ImportWriter, line: Line, path: Path) -> None:
    task_id = ""
    try:
        if line.record is None:
            raise BadRecord(line.reason)
        task_id = _task_id(line.record)
        messages = _messages(line.record)
        images = _images(line.record, num_images(messages), path.parent)
        reward = reward_of(line.record)
        rank = _quality_rank(line.record)
    except BadRecord as bad:
        writer.add_reject(bad, path=path.name, line=line.number, task_id=task_id)
        return
    for image in images:
        writer.add_image(image)
    dataset = line.record.get("source_dataset")
    named = isinstance(dataset, str) and dataset
    writer.add_demonstration(
        task_id=task_id,
        messages=messages,
        images=[image.name for image in images],
        reward=reward,
        # The path includes the row's own dataset, because only the path is kept.
        source_path=f"{path.name}#{dataset}" if named else path.name,
        source_line=line.number,
        extra={"source_dataset": dataset, "quality_rank": rank} if named else None,
    )


def _task_id(record: Mapping[str, Any]) -> str:
    """The chunk's own id, if the row has it."""
    original = record.get("original_task_id")
    return original if isinstance(original, str) and original else task_id_of(record)


def _quality_rank(record: Mapping[str, Any]) -> int | None:
    rank = record.get("quality_rank")
    if rank is None or (isinstance(rank, int) and abs(rank) < 2**31):
        return rank
    raise BadRecord("quality_rank is not a whole number of 32 bits")


def _messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    dialect = load_dialect(DIALECT)
    try:
        messages = normalise_messages(messages_of(record), system_prompt=dialect.system_prompt(SYSTEM_PROMPT))
    except DatasetError as error:
        raise BadRecord(str(error)) from error
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                dialect.parse_strict(text_of(message))
            except ActionParseError as error:
                raise BadRecord(f"turn {index}: {error}", kind="dropped_parse") from error
    return messages


def _images(record: Mapping[str, Any], num_placeholders: int, folder: Path) -> list[ProvenImage]:
    texts = images_of(record)
    if len(texts) != num_placeholders:
        raise BadRecord(f"there are {num_placeholders} image placeholders and {len(texts)} images", kind="bad_image")
    images: list[ProvenImage] = []
    for index, text in enumerate(texts):
        try:
            images.append(prove_image(load_image(text, folder)[0]))
        except DatasetError as error:
            raise BadRecord(f"image {index}: {error}", kind="bad_image") from error
    return images
