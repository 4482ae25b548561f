"""Fallback for a response in an unknown format: guesses an action from its text. Such steps are penalised."""

import json
import re
from typing import Any

from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.dialects.keys import KEY_ALIASES, KEY_NAMES, normalise_key
from osworld_pipeline.dialects.slime_actions import normalise_action
from osworld_pipeline.errors import ActionParseError

_ACTION = re.compile(r'"action"\s*:\s*"(\w+)"')
_POINT = re.compile(r"[\[(]\s*(\d{1,5})\s*,\s*(\d{1,5})\s*[\])]")
_UNIT_POINT = re.compile(r"[\[(]\s*([01](?:\.\d{0,9})?|\.\d{1,9})\s*,\s*([01](?:\.\d{0,9})?|\.\d{1,9})\s*[\])]")
_QUOTED_TEXT = re.compile(r"\btype\b[^\"'\n]{0,40}(?:\"([^\"\n]+)\"|'([^'\n]+)')", re.IGNORECASE)
_JSON_TEXT = re.compile(r'"text"\s*:\s*"((?:[^"\\]|\\.)+)"')
_JSON_KEYS = re.compile(r'"keys"\s*:\s*\[([^\]]*)\]?')
_PRESS = re.compile(r"\b(?:press|hit|key)\b\s+(?:the\s+)?[\"'`]?([\w+]+(?:\s*\+\s*\w+)*)", re.IGNORECASE)
_SCROLL = re.compile(r"\bscroll\b\W+(?:\w+\W+){0,2}?(up|down)\b", re.IGNORECASE)
_NUMBER = re.compile(r'"amount"\s*:\s*(\d{1,3})')
_STATUS = re.compile(r'"status"\s*:\s*"(success|failure)"')


def guess_action(text: str, space: CoordinateSpace = "model_pixels") -> dict[str, Any] | None:
    """An action in normal form, or None if the text suggests none."""
    # A text with `"action": "..."` is a damaged tool call: only its fields are read, since the text that it types may
    # look like an instruction.
    guesses = (_json_fragment,) if _ACTION.search(text) else (_wait, _click, _typing, _key, _scrolling)
    for guess in guesses:
        raw = guess(text, space)
        if raw is None:
            continue
        try:
            return normalise_action(raw, space)
        except ActionParseError:
            continue
    return None


def _json_fragment(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    """Truncated or invalid JSON that still contains its action and the required arguments."""
    match = _ACTION.search(text)
    if match is None:
        return None
    raw: dict[str, Any] = {"action": match.group(1)}
    if point := _point(text, space):
        raw["coordinate"] = raw["end_coordinate"] = point
    if quoted := _JSON_TEXT.search(text):
        try:
            raw["text"] = json.loads(f'"{quoted.group(1)}"', strict=False)
        except ValueError:
            raw["text"] = quoted.group(1)
    if keys := _JSON_KEYS.search(text):
        raw["keys"] = re.findall(r'"([^"]+)"', keys.group(1))
    if scroll := re.search(r'"direction"\s*:\s*"(up|down)"', text):
        raw["direction"] = scroll.group(1)
    if amount := _NUMBER.search(text):
        raw["amount"] = int(amount.group(1))
    if status := _STATUS.search(text):
        raw["status"] = status.group(1)
    elif raw["action"] == "terminate":
        # A guess must not end the episode.
        return None
    return raw


def _point(text: str, space: CoordinateSpace) -> list[float] | None:
    match = (_UNIT_POINT if space == "unit" else _POINT).search(text)
    return [float(match.group(1)), float(match.group(2))] if match else None


def _wait(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    return {"action": "wait"} if re.search(r"\bwait\b", text, re.IGNORECASE) else None


def _click(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    point = _point(text, space)
    if point is None or not re.search(r"click|double|right", text, re.IGNORECASE):
        return None
    action = "left_click"
    if re.search(r"double", text, re.IGNORECASE):
        action = "double_click"
    elif re.search(r"\bright\b|right_click", text, re.IGNORECASE):
        action = "right_click"
    return {"action": action, "coordinate": point}


def _typing(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    match = _QUOTED_TEXT.search(text)
    return {"action": "type", "text": match.group(1) or match.group(2)} if match else None


def _key(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    match = _PRESS.search(text)
    if match is None:
        return None
    names = [name.strip() for name in match.group(1).split("+") if name.strip()]
    # "press a button" must not press the letter a: a single character counts only with a modifier.
    if len(names) == 1 and names[0].lower() not in KEY_NAMES and names[0].lower() not in KEY_ALIASES:
        return None
    try:
        return {"action": "key", "keys": [normalise_key(name) for name in names]}
    except ActionParseError:
        return None


def _scrolling(text: str, space: CoordinateSpace) -> dict[str, Any] | None:
    match = _SCROLL.search(text)
    return {"action": "scroll", "direction": match.group(1).lower(), "amount": 3} if match else None
