"""Reads the fields of raw records: the JSON itself, task id, turns, images and reward."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from osworld_pipeline.datasets.rejects import BadRecord

MAX_NESTING = 200
"""Maximum nesting of lists and objects in values kept verbatim: writers and desktops refuse deeper ones."""


def read_json(text: bytes | str) -> Any:
    """A JSON value. NaN is accepted; only Python's own parser reads it.

    Raises:
        BadRecord: not JSON, or a lone surrogate, which neither a table nor a UTF-8 file can hold.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _read_leniently(text, error)


def read_exactly(text: bytes | str) -> Any:
    """Does the same as read_json, but integers of any size are exact; slower. Raises BadRecord, also for deep
    nesting."""
    value = _read_leniently(text, None)
    if _is_deeper(value, MAX_NESTING):
        raise BadRecord(f"nested deeper than {MAX_NESTING} levels")
    return value


def _read_leniently(text: bytes | str, error: orjson.JSONDecodeError | None) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRecord("not valid Unicode: an incomplete character (a lone surrogate)") from None
    except (ValueError, RecursionError) as problem:
        raise BadRecord(f"not JSON: {error or problem}") from None
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def read_object(text: bytes | str, *, exactly: bool = False) -> dict[str, Any]:
    """`exactly`: use read_exactly. Raises BadRecord if the text is not a JSON object."""
    record = read_exactly(text) if exactly else read_json(text)
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    return record


def task_id_of(record: Mapping[str, Any]) -> str:
    """Raises BadRecord if there is none, or it is not text."""
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
            raise BadRecord(f"the task id is not text but {type(found).__name__}")
        return found
    raise BadRecord("no task id at task_id, id, metadata.task_id or metadata.id")


def messages_of(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Raises BadRecord if there are none, or they are not objects."""
    found = record.get("messages") or record.get("conversations")
    if not found:
        raise BadRecord("no messages at messages or conversations")
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise BadRecord("the messages are not a list of objects")
    return found


def images_of(record: Mapping[str, Any]) -> Sequence[str]:
    found = record.get("images") or []
    if not isinstance(found, list) or not all(isinstance(image, str) for image in found):
        raise BadRecord("the images are not a list of texts")
    return found


def reward_of(record: Mapping[str, Any]) -> float | None:
    """None if the record has none. Raises BadRecord if it is not a number in 0..1."""
    found = record.get("reward")
    if found is None:
        return None
    try:
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise BadRecord("the reward is not a number")
        if not 0.0 <= found <= 1.0:
            raise BadRecord(f"the reward {found:g} is not within 0..1")
        return float(found)
    except OverflowError:
        raise BadRecord("the reward is too large a number") from None


def config_of(found: Any) -> dict[str, Any] | None:
    """Returns a config given as a JSON string or an object; None if it is empty. Raises BadRecord."""
    if found is None or found in ("", "{}"):
        return None
    try:
        config = read_exactly(found) if isinstance(found, str) else found
    except BadRecord as bad:
        raise BadRecord(f"the task_config is {bad.reason}") from None
    if not isinstance(config, dict):
        raise BadRecord("the task_config is not a JSON object")
    return config or None
