"""The two output forms of a demonstration and their checks: a line of the replay artefact, which keeps the record's own
messages, and a row of the replay table, whose messages are normalised and whose images are blobs."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from osworld_pipeline.datasets.images import load_image
from osworld_pipeline.datasets.normalize import IMAGE_PLACEHOLDER
from osworld_pipeline.datasets.records import images_of, messages_of, read_exactly, reward_of
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.dialects import Dialect, load_dialect
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.errors import DatasetError

ASSUMED_REWARD = 1.0
"""Reward of a demonstration without one; the row of the table marks it as assumed."""
ROWS_FOLLOW = "rows follow"
"""A worker's message before the bytes of its rows."""
CACHED_TURNS = 4096
KEY_BYTES = 16
"""Bytes of a demonstration's digest that stay in memory."""
ROW_ID_LENGTH = 24
_MESSAGE_KEYS = ("role", "content")
_PART_KEYS = (("type", "text"), ("type",))
_ORDER = {"role": 0, "content": 1, "type": 2, "text": 3}
# Patterns that Slime-OSWorld's fallback parser accepts as an action and ours does not.
_LOOSE_CALL = re.compile(
    r"pyautogui\.(?:(?:double|right|triple)?click|write|typewrite|press|hotkey|scroll|move(?:to)?|drag(?:to)?|screenshot)"
    r"\s*\(.*\)",
    re.IGNORECASE | re.DOTALL,
)
_LOOSE_END = re.compile(r"(?:^|>)\s*(?:done|fail)\s*(?:$|<)", re.IGNORECASE)
_LOOSE_WORDS = ("click", "wait", "scroll")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The configuration of a worker; plain values, sent once."""

    form: Literal["artefact", "table"]
    system_prompt: str
    dialect: str
    max_line_bytes: int
    blobs: Path | None = None
    """Folder for the images of table rows."""
    output: Path | None = None
    """The file that workers write into, each at the offset it receives; None: rows go to the parent."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a block, common to all its rows."""

    source: str
    path: str
    folder: Path
    """Folder of the file; relative image paths must stay in it."""
    quality_rank: int
    licence: str = ""
    is_import: bool = False
    """Its records contain their original place."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A usable record; the parent decides whether it is a duplicate."""

    line_no: int
    """Line number in the block."""
    task_id: str
    key: bytes
    """Equal for equal demonstrations of one task."""
    content: Any
    """The data that the form needs to write it."""
    reward: float | None = None
    """The recorded reward; None if the record has none."""

    @property
    def base_id(self) -> str:
        return base_task_id(self.task_id)


Examined = tuple[bytes, Any, float | None]
"""The key of a record, the content to write, and the recorded reward."""


class Form(Protocol):
    def examine(self, record: Mapping[str, Any], line: bytes, task_id: str, origin: Origin) -> Examined:
        """Raises BadRecord."""
        ...

    def write(self, candidates: list[Candidate], origin: Origin, first_line: int) -> bytes:
        """The rows in the form sent to the parent. Empties the list, so that large images are not held twice. Raises
        StoreError."""
        ...


def row_id_of(digest: bytes) -> str:
    """The id of a row of the table, from its digest or its key."""
    return digest.hex()[:ROW_ID_LENGTH]


class ArtefactForm:
    """Slime-OSWorld's replay line: messages and images verbatim, with our system turn."""

    def __init__(self, setup: Setup) -> None:
        self._system = {"role": "system", "content": setup.system_prompt}
        dialect = load_dialect(setup.dialect)
        self._is_action = lru_cache(CACHED_TURNS)(lambda text: is_action(dialect, text))

    def examine(self, record: Mapping[str, Any], line: bytes, task_id: str, origin: Origin) -> Examined:
        messages = messages_of(record)
        images = images_of(record)
        reward = reward_of(record)
        is_plain = _are_plain(messages)
        if not is_plain:
            # The fast parser would lose digits of numbers beyond 64 bits.
            messages = messages_of(read_exactly(line))
        turns = [self._system, *(messages[1:] if messages[0].get("role") == "system" else messages)]
        answers = [_joined_text(turn.get("content")) for turn in turns if turn.get("role") == "assistant"]
        for text in answers:
            if not self._is_action(text):
                raise BadRecord(f"no action could be read in the turn that begins {text[:60]!r}", kind="dropped_parse")
        if images:
            # In a record without images, a text-only copy, placeholders are plain text.
            for _ in checked_images(images, sum(map(_num_placeholders, turns)), origin.folder):
                pass
        base_id = base_task_id(task_id)
        written = orjson.dumps(turns) if is_plain else _exact_json(turns)
        key = hashlib.sha256(base_id.encode() + b"\0")
        key.update(written if is_plain else _exact_json([_in_order(turn) for turn in turns]))
        rest = {
            "images": record.get("images", []),
            "reward": ASSUMED_REWARD if reward is None else reward,
            "task_id": base_id,
            "num_steps": len(answers),
            "original_task_id": task_id,
            "source_dataset": origin.source,
            "quality_rank": origin.quality_rank,
        }
        return key.digest()[:KEY_BYTES], (written, rest), reward

    def write(self, candidates: list[Candidate], origin: Origin, first_line: int) -> bytes:
        pieces = []
        candidates.reverse()
        while candidates:
            messages, rest = candidates.pop().content
            pieces += (b'{"messages":', messages, b",", memoryview(orjson.dumps(rest))[1:], b"\n")
            del messages, rest
        return b"".join(pieces)


def checked_images(images: Sequence[str], num_placeholders: int, folder: Path) -> Iterator[tuple[bytes, str]]:
    """Bytes and suffix of each. Raises BadRecord if their number differs from `num_placeholders`, or one is damaged."""
    if len(images) != num_placeholders:
        raise BadRecord(f"there are {num_placeholders} image placeholders and {len(images)} images", kind="bad_image")
    for index, text in enumerate(images):
        try:
            yield load_image(text, folder)
        except DatasetError as error:
            raise BadRecord(f"image {index}: {error}", kind="bad_image") from None


def _num_placeholders(turn: Mapping[str, Any]) -> int:
    content = turn.get("content")
    if isinstance(content, str):
        return content.count(IMAGE_PLACEHOLDER) if turn.get("role") == "user" else 0
    if not isinstance(content, list):
        return 0
    parts = [part for part in content if isinstance(part, dict)]
    if named := sum(part.get("type") == "image" for part in parts):
        return named
    if turn.get("role") != "user":
        return 0
    return sum(text.count(IMAGE_PLACEHOLDER) for part in parts if isinstance(text := part.get("text"), str))


def _joined_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str))


def _are_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all messages have the keys role and content in this order, all parts have type, or type and text in this
    order, and all values are strings. Equal messages in this form are equal bytes."""
    for message in messages:
        if tuple(message) != _MESSAGE_KEYS or type(message["role"]) is not str:
            return False
        content = message["content"]
        if type(content) is str:
            continue
        if type(content) is not list:
            return False
        for part in content:
            if type(part) is not dict or tuple(part) not in _PART_KEYS:
                return False
            for value in part.values():
                if type(value) is not str:
                    return False
    return True


def _in_order(value: Any) -> Any:
    """The same value with the keys of every object in a fixed order, that of a plain message first."""
    if isinstance(value, dict):
        return {name: _in_order(value[name]) for name in sorted(value, key=lambda name: (_ORDER.get(name, 9), name))}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def is_action(dialect: Dialect, text: str) -> bool:
    """Whether Slime-OSWorld's lenient parser or our dialect finds an action. A row of the artefact stays text, and its
    reader may be as lenient. The lenient patterns are tried first, because that is cheap."""
    lowered = text.lower()
    if any(word in lowered for word in _LOOSE_WORDS) or ("type" in lowered and '"' in lowered):
        return True
    return bool(_LOOSE_CALL.search(text) or _LOOSE_END.search(text)) or dialect.parse(text).is_parsed


def _exact_json(value: Any) -> bytes:
    """Compact JSON like the fast writer's, with integers of any size and NaN as Python writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
