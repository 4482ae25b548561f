"""The normal form of actions, for all dialects: a mapping with `action` and its arguments, known keys only, coordinates
in the model's units, keys by pyautogui's names.

Several actions of one turn are {"action": "sequence", "actions": [...]}.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.dialects.coordinates import CoordinateSpace, limit_of, round_coordinate
from osworld_pipeline.dialects.keys import normalise_key
from osworld_pipeline.domain.pyautogui import MAX_SLEEP_S, MAX_TEXT_CHARS
from osworld_pipeline.errors import ActionParseError

Arguments = Mapping[str, Any]
"""An action in normal form."""

SEQUENCE = "sequence"
CLICKS = ("left_click", "right_click", "middle_click", "double_click", "triple_click")
POINT_KEYS = ("coordinate", "start_coordinate", "end_coordinate")
"""Keys whose values are points."""
_PLACES = {
    "left_click_drag": "start_coordinate",
    **dict.fromkeys(("scroll", "hscroll", "mouse_down", "mouse_up"), "coordinate"),
}
"""The key of an action's optional place."""
MAX_SCROLL = 1_000
MAX_ACTIONS = 32
"""Limit of the actions in a sequence."""
WAIT_S = 2.0
"""Duration of a wait in a sequence, if the wait has no duration of its own."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The actions that a dialect can express."""

    names: frozenset[str]
    takes_sequences: bool
    clicks_at_pointer: bool = False
    """Whether the place of a click is optional."""


def normalise(raw: Arguments, *, space: CoordinateSpace, vocabulary: Vocabulary) -> dict[str, Any]:
    """The action, or sequence of actions, in normal form.

    Raises:
        ActionParseError: an action that the dialect does not have, an argument that is missing or of the wrong kind, or
            a sequence that is empty, not permitted, over a limit, or continues after the end of the task.
    """
    if raw.get("action") != SEQUENCE:
        return _single(raw, space, vocabulary)
    actions = raw.get("actions")
    if not isinstance(actions, list | tuple) or not actions or not all(isinstance(one, Mapping) for one in actions):
        raise ActionParseError("a sequence needs 'actions', a list that is not empty")
    if len(actions) > MAX_ACTIONS:
        raise ActionParseError(f"the turn has {len(actions)} actions; at most {MAX_ACTIONS} are executed")
    singles = _merged([_single(one, space, vocabulary) for one in actions])
    if len(singles) == 1:
        return singles[0]
    if not vocabulary.takes_sequences:
        raise ActionParseError(f"the turn has {len(singles)} actions, and must have one")
    if any(one["action"] == "terminate" for one in singles[:-1]):
        raise ActionParseError("no action is possible after the end of the task")
    singles = [{"seconds": WAIT_S, **one} if one["action"] == "wait" else one for one in singles]
    if sum(one.get("seconds", 0) for one in singles) > MAX_SLEEP_S:
        raise ActionParseError(f"the waits of one turn take longer than {MAX_SLEEP_S:g} s")
    if sum(len(literal(one["text"])) for one in singles if "text" in one) > MAX_TEXT_CHARS // 2:
        raise ActionParseError("the turn has too much text to type")
    return {"action": SEQUENCE, "actions": singles}


def _merged(singles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges a move into a following action at the pointer, as that action's start: both forms are equivalent, and the
    normal form is unique."""
    merged: list[dict[str, Any]] = []
    for one in singles:
        key = _PLACES.get(one["action"])
        if key and key not in one and merged and merged[-1]["action"] == "mouse_move":
            one = {"action": one["action"], key: merged.pop()["coordinate"], **one}
        merged.append(one)
    return merged


def actions_in(arguments: Arguments) -> list[Arguments]:
    """The single actions of an action in normal form."""
    return list(arguments["actions"]) if arguments["action"] == SEQUENCE else [arguments]


def with_actions(actions: list[dict[str, Any]]) -> dict[str, Any]:
    """A single action unchanged, several as a sequence."""
    return actions[0] if len(actions) == 1 else {"action": SEQUENCE, "actions": actions}


def ends_episode(arguments: Arguments) -> bool:
    return actions_in(arguments)[-1]["action"] == "terminate"


def action_type(arguments: Arguments) -> str:
    """The action's name; of a sequence the distinct names in it, in order, joined by +."""
    return "+".join(dict.fromkeys(one["action"] for one in actions_in(arguments)))


def first_point(arguments: Arguments) -> list[int | float] | None:
    """The first point of the turn; None if there is none."""
    points = (one[key] for one in actions_in(arguments) for key in POINT_KEYS if key in one)
    return next(points, None)


def last_point(arguments: Arguments) -> list[int | float] | None:
    """The final position of the pointer; None if the turn does not move it."""
    places = (one.get("end_coordinate", one.get("coordinate")) for one in reversed(actions_in(arguments)))
    return next((place for place in places if place is not None), None)


def at_pointer(arguments: Arguments, pointer: list[int | float]) -> dict[str, Any]:
    """The same action with each omitted place of a drag, a scroll or a mouse button set to the position of the pointer
    at that moment. `pointer`: its position before the turn."""
    actions = [dict(one) for one in actions_in(arguments)]
    for one in actions:
        key = _PLACES.get(one["action"])
        if key and key not in one:
            one[key] = pointer
        pointer = last_point(one) or pointer
    return with_actions(actions)


def move_points(arguments: Arguments, move: Callable[[float, float], tuple[float, float]]) -> dict[str, Any]:
    """The same action with every point moved."""
    if arguments["action"] == SEQUENCE:
        return {**arguments, "actions": [move_points(one, move) for one in arguments["actions"]]}
    points = {key: list(move(*arguments[key])) for key in POINT_KEYS if key in arguments}
    return {**arguments, **points}


def literal(text: str) -> str:
    """A Python string literal on one line."""
    # JSON's escapes are a subset of Python's; line separators other than \n must be escaped in the literal, too.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if char in "\x85\u2028\u2029" else char for char in quoted)


def _single(raw: Arguments, space: CoordinateSpace, vocabulary: Vocabulary) -> dict[str, Any]:
    action = raw.get("action")
    if not isinstance(action, str):
        raise ActionParseError("the tool call has no 'action'")
    action = action.strip().lower()
    if action not in vocabulary.names:
        raise ActionParseError(f"unknown action '{action[:40]}'; there are: {', '.join(sorted(vocabulary.names))}")
    if action in CLICKS and vocabulary.clicks_at_pointer and "coordinate" not in raw:
        return {"action": action}
    return {"action": action, **_NORMALISERS[action](raw, space)}


def _coordinate(raw: Arguments, space: CoordinateSpace, key: str = "coordinate") -> dict[str, Any]:
    value = raw.get(key)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ActionParseError(f"'{key}' must be [x, y]")
    point: list[int | float] = []
    for number in value:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        # False for NaN. An integer of 400 digits can be compared, but not converted to a float.
        if not is_number or not 0 <= number <= limit_of(space):
            raise ActionParseError(f"'{key}' must hold two numbers from 0 to {limit_of(space)}")
        point.append(round_coordinate(number, space))
    return {key: point}


def _drag(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    start = _coordinate(raw, space, "start_coordinate") if "start_coordinate" in raw else {}
    end = raw if "end_coordinate" in raw else {"end_coordinate": raw.get("coordinate")}
    return {**start, **_coordinate(end, space, "end_coordinate")}


def _text(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    text = raw.get("text")
    if not isinstance(text, str) or not text:
        raise ActionParseError("'type' needs a 'text' that is not empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ActionParseError("'text' holds an incomplete character (a lone surrogate)")
    if len(text) > MAX_TEXT_CHARS // 2 or len(literal(text)) > MAX_TEXT_CHARS // 2:
        raise ActionParseError(f"'text' is too long to be typed in one action: {len(text)} characters")
    return {"text": text}


def _keys(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    keys = raw.get("keys", raw.get("key"))
    if isinstance(keys, str):
        keys = [keys] if len(keys) == 1 else [part for part in keys.split("+") if part]
    if not isinstance(keys, list | tuple) or not 1 <= len(keys) <= 8 or not all(isinstance(key, str) for key in keys):
        raise ActionParseError("'key' needs 'keys', a list of one to eight key names")
    return {"keys": [normalise_key(key) for key in keys]}


def _held(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    keys = _keys(raw, space)["keys"]
    if len(keys) != 1:
        raise ActionParseError("only one key can be held or released at a time")
    return {"keys": keys}


def _button(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    button = raw.get("button", "left")
    if button not in ("left", "right", "middle"):
        raise ActionParseError("'button' must be left, right or middle")
    return {"button": button, **(_coordinate(raw, space) if "coordinate" in raw else {})}


def _scrolling(directions: tuple[str, str]) -> Callable[[Arguments, CoordinateSpace], dict[str, Any]]:
    def normaliser(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
        direction = raw.get("direction")
        if direction not in directions:
            raise ActionParseError(f"'direction' of a scroll must be {directions[0]} or {directions[1]}")
        amount = raw.get("amount", 3)
        if not isinstance(amount, int | float) or isinstance(amount, bool) or not 1 <= amount <= MAX_SCROLL:
            raise ActionParseError(f"'amount' of a scroll must be a number from 1 to {MAX_SCROLL}")
        place = _coordinate(raw, space) if "coordinate" in raw else {}
        return {**place, "direction": direction, "amount": round(amount)}

    return normaliser


def _wait(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    seconds = raw.get("seconds")
    if seconds is None:
        return {}
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds >= 0:
        raise ActionParseError("'seconds' of a wait must be a number of 0 or more")
    return {"seconds": round(float(min(seconds, MAX_SLEEP_S)), 3)}


def _status(raw: Arguments, space: CoordinateSpace) -> dict[str, Any]:
    status = raw.get("status", "success")
    if status not in ("success", "failure"):
        raise ActionParseError("'status' must be success or failure")
    return {"status": status}


_NORMALISERS: dict[str, Callable[[Arguments, CoordinateSpace], dict[str, Any]]] = {
    **dict.fromkeys((*CLICKS, "mouse_move"), _coordinate),
    "left_click_drag": _drag,
    "mouse_down": _button,
    "mouse_up": _button,
    "type": _text,
    "key": _keys,
    "key_down": _held,
    "key_up": _held,
    "scroll": _scrolling(("up", "down")),
    "hscroll": _scrolling(("left", "right")),
    "wait": _wait,
    "terminate": _status,
}
ACTION_NAMES = tuple(_NORMALISERS)
