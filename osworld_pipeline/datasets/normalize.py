"""Demonstrations in one form: content is always a list of {type: text|image}, and our system prompt comes first."""

from collections.abc import Mapping, Sequence
from typing import Any

from osworld_pipeline.errors import DatasetError

IMAGE_PLACEHOLDER = "<image>"

Message = dict[str, Any]


def normalise_messages(messages: Sequence[Mapping[str, Any]], *, system_prompt: str) -> tuple[Message, ...]:
    """The conversation with our system prompt, which replaces the recorded one.

    In a user's turn without image parts (a string, or a list of texts), each `<image>` (with adjacent line breaks) is
    an image. If the content is a list with image parts, or the turn is the assistant's, `<image>` is plain text.

    Raises:
        DatasetError: a turn without role or content, an unknown role, an image in an assistant's turn, or no assistant
            turn; the message names the turn, if it is about one.
    """
    turns: list[Message] = [{"role": "system", "content": [{"type": "text", "text": system_prompt}]}]
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "system":
            continue
        if role not in ("user", "assistant"):
            raise DatasetError(f"turn {index} has the role {role!r}; known are system, user and assistant")
        content = _content(message.get("content"), has_placeholders=role == "user")
        if content is None:
            raise DatasetError(f"turn {index} ({role}) has no content of text and images")
        if role == "assistant" and any(part["type"] == "image" for part in content):
            raise DatasetError(f"turn {index} is an assistant's and holds an image")
        turns.append({"role": role, "content": content})
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DatasetError("no assistant turn")
    return tuple(turns)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a normalised turn."""
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])


def _content(content: Any, *, has_placeholders: bool) -> list[dict[str, str]] | None:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        return None
    has_placeholders = has_placeholders and not any(
        isinstance(part, dict) and part.get("type") == "image" for part in parts
    )
    normal: list[dict[str, str]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            normal.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            text = part["text"]
            normal += _split_text(text) if has_placeholders else [{"type": "text", "text": text}] if text else []
        else:
            return None
    return normal or None


def _split_text(text: str) -> list[dict[str, str]]:
    if IMAGE_PLACEHOLDER not in text:
        return [{"type": "text", "text": text}] if text else []
    pieces = text.split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(pieces):
        if index:
            parts.append({"type": "image"})
            piece = piece.removeprefix("\n")
        if index < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts
