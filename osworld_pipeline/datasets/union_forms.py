"""The two forms a demonstration is written in, with what each asks of a record: a line of the replay artefact, which
keeps the record's own messages, and a row of the replay table, whose messages are in one form and whose images are
blobs."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from osworld_pipeline.agent.dialects import Dialect, load_dialect
from osworld_pipeline.datasets.images import load_image
from osworld_pipeline.datasets.normalize import IMAGE_PLACEHOLDER
from osworld_pipeline.datasets.records import images_of, messages_of, read_exactly, reward_of
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.errors import DatasetError

ASSUMED_REWARD = 1.0
"""Of a demonstration that does not say; the row of the table says that it was assumed."""
ROWS_FOLLOW = "rows follow"
"""A worker's message before the bytes of its rows."""
CACHED_TURNS = 4096
KEY_BYTES = 16
"""Of a demonstration's digest that stay in memory."""
ROW_ID_LENGTH = 24
_MESSAGE_KEYS = ("role", "content")
_PART_KEYS = (("type", "text"), ("type",))
_ORDER = {"role": 0, "content": 1, "type": 2, "text": 3}
# Words that Slime-OSWorld's fallback takes for an action where ours sees none.
_LOOSE_CALL = re.compile(
    r"pyautogui\.(?:(?:double|right|triple)?click|write|typewrite|press|hotkey|scroll|move(?:to)?|drag(?:to)?|screenshot)"
    r"\s*\(.*\)",
    re.IGNORECASE | re.DOTALL,
)
_LOOSE_END = re.compile(r"(?:^|>)\s*(?:done|fail)\s*(?:$|<)", re.IGNORECASE)
_LOOSE_WORDS = ("click", "wait", "scroll")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All a worker must know; plain values, sent once."""

    form: Literal["artefact", "table"]
    system_prompt: str
    dialect: str
    max_line_bytes: int
    blobs: Path | None = None
    """Where the images of table rows go."""
    output: Path | None = None
    """The file that workers write into themselves, each where it is told; None: rows go to the parent."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a block comes from: what all its rows have in common."""

    source: str
    path: str
    folder: Path
    """Of the file; its relative images stay in it."""
    quality_rank: int
    licence: str = ""
    is_import: bool = False
    """Its records say themselves where they stood."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A usable record that waits for the word whether it is the first of its kind."""

    line_no: int
    """In the block."""
    task_id: str
    key: bytes
    """Equal for equal demonstrations of one task."""
    content: Any
    """What the form needs to write it."""
    reward: float | None = None
    """As the record says it; None where it does not."""

    @property
    def base_id(self) -> str:
        return base_task_id(self.task_id)


Examined = tuple[bytes, Any, float | None]
"""The key of a record, what is to be written of it, and the reward that it records."""


class Form(Protocol):
    def examine(self, record: Mapping[str, Any], line: bytes, task_id: str, origin: Origin) -> Examined:
        """Raises BadRecord."""
        ...

    def write(self, candidates: list[Candidate], origin: Origin, first_line: int) -> bytes:
        """The rows as they go to the parent; uses the list up, so that large images need not be there twice. Raises
        StoreError."""
        ...


def row_id_of(digest: bytes) -> str:
    """The id of a row of the table; the key of its record is enough."""
    return digest.hex()[:ROW_ID_LENGTH]


def make_form(setup: Setup) -> Form:
    if setup.form == "artefact":
        return ArtefactForm(setup)
    from osworld_pipeline.datasets.union_rows import TableForm

    return TableForm(setup)


class ArtefactForm:
    """Slime-OSWorld's replay line: messages and images verbatim, only the system turn is ours."""

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
            # Numbers beyond 64 bits would lose digits in the fast reader.
            messages = messages_of(read_exactly(line))
        turns = [self._system, *(messages[1:] if messages[0].get("role") == "system" else messages)]
        answers = [_joined_text(turn.get("content")) for turn in turns if turn.get("role") == "assistant"]
        for text in answers:
            if not self._is_action(text):
                raise BadRecord(f"no action could be read in the turn that begins {text[:60]!r}", kind="dropped_parse")
        if images:
            # Without any image the placeholders are words: a text-only copy.
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
    """Bytes and suffix of each. Raises BadRecord where they are not as many as they must be, or one is damaged."""
    if len(images) != num_placeholders:
        raise BadRecord(f"{num_placeholders} image placeholders, {len(images)} images", kind="bad_image")
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
    """Role and content in this order, parts of type and text in this order, texts all of them: the form in which equal
    messages are equal bytes."""
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
    """The same with the keys of every object in one order, that of a plain message first."""
    if isinstance(value, dict):
        return {name: _in_order(value[name]) for name in sorted(value, key=lambda name: (_ORDER.get(name, 9), name))}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def is_action(dialect: Dialect, text: str) -> bool:
    """Slime-OSWorld's lenient reading sees an action in it, or our dialect does: a row of the artefact stays text, and
    who takes it in may be as lenient. Its words are asked first, because that is cheap."""
    lowered = text.lower()
    if any(word in lowered for word in _LOOSE_WORDS) or ("type" in lowered and '"' in lowered):
        return True
    return bool(_LOOSE_CALL.search(text) or _LOOSE_END.search(text)) or dialect.parse(text).is_parsed


def _exact_json(value: Any) -> bytes:
    """Compact, as the fast writer's, but with numbers of any size, and NaN as Python writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
