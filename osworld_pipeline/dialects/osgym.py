"""OSGym's dialect: `<|think_start|>...<|think_end|><|action_start|>click(100,100)<|action_end|>`, several calls joined
by `&`. Text that is not a call is an error, not a silent wait.

Arguments are unquoted. Typed text may contain commas, parentheses and `&`, so a call ends only at a `)` that is
followed by the end of the text, or by `&` and another known call.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from osworld_pipeline.dialects.actions import SEQUENCE, Arguments, Vocabulary, actions_in
from osworld_pipeline.dialects.base import Grammar, Reading
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.errors import ActionParseError

SCROLL_CLICKS = 50
"""OSGym's scroll amounts for `up` and `down`."""
MAX_DESCRIPTION_CHARS = 400
_THINK = re.compile(r"<\|think_start\|>(.*?)(?:<\|think_end\|>|(?=<\|action_start\|>)|\Z)", re.DOTALL)
_ACTION = re.compile(r"<\|action_start\|>(.*?)(?:<\|action_end\|>|\Z)", re.DOTALL)
_ARTEFACTS = re.compile(r"(?:<\|im_end\|>|<\|endoftext\|>|</s>)\s*\Z")
_NUMBER = re.compile(r"[+-]?(?:\d{1,6}(?:\.\d{1,9})?|\.\d{1,9})", re.ASCII)


def describe(text: str) -> str:
    """The thought, on one line."""
    match = _THINK.search(text)
    return " ".join(match[1].split())[:MAX_DESCRIPTION_CHARS] if match else ""


def read(text: str, space: CoordinateSpace) -> Reading:
    text = _ARTEFACTS.sub("", text)
    match = _ACTION.search(text)
    body = match[1] if match else _THINK.sub("", text)
    calls = [_read_call(part) for part in _joined(body.strip())]
    return Reading(raw={"action": SEQUENCE, "actions": calls})


def write(description: str, action: Arguments) -> str:
    thought = re.sub(r"<\|[^>]*\|>|[<>|]", "", description)
    calls = "&".join(_written(one) for one in actions_in(action))
    return f"<|think_start|>{thought}<|think_end|><|action_start|>{calls}<|action_end|>"


def _joined(text: str) -> list[str]:
    """Splits the calls. Text after `type(` that cannot be parsed as a call is typed, including `&`."""
    first, *others = _JOIN.split(text)
    parts = [first]
    for joint, piece in zip(others[::2], others[1::2], strict=True):
        try:
            _read_call(piece)
        except ActionParseError:
            if not parts[-1].startswith("type("):
                raise
            parts[-1] += joint + piece
        else:
            parts.append(piece)
    return parts


def _read_call(text: str) -> dict[str, Any]:
    match = _CALL.fullmatch(text)
    if match is None:
        known = ", ".join(f"{name}()" for name in CALL_NAMES)
        raise ActionParseError(f"{text[:80]!r} is not a call; known: {known}")
    name, body = match["name"], match["body"]
    if name in _PLAIN:
        if body.strip():
            raise ActionParseError(f"{name}() takes no arguments, not {body[:40]!r}")
        return dict(_PLAIN[name])
    return _READERS[name](name, body)


def _points(name: str, body: str, count: int) -> list[list[float]]:
    values = [part.strip() for part in body.split(",")]
    if len(values) != 2 * count or not all(_NUMBER.fullmatch(value) for value in values):
        raise ActionParseError(f"{name}() takes {2 * count} numbers, not {body[:40]!r}")
    numbers = [float(value) for value in values]
    return [numbers[index : index + 2] for index in range(0, len(numbers), 2)]


def _read_point(name: str, body: str) -> dict[str, Any]:
    return {"action": _AT[name], "coordinate": _points(name, body, 1)[0]}


def _read_drag(name: str, body: str) -> dict[str, Any]:
    start, end = _points(name, body, 2)
    return {"action": "left_click_drag", "start_coordinate": start, "end_coordinate": end}


def _read_scroll(name: str, body: str) -> dict[str, Any]:
    place, _, how = (part.strip() for part in body.rpartition(","))
    amount = {"up": SCROLL_CLICKS, "down": -SCROLL_CLICKS}.get(how.lower())
    if amount is None and re.fullmatch(r"[+-]?\d{1,6}", how, re.ASCII):
        amount = int(how)
    if not amount:
        raise ActionParseError(f"scroll() takes x, y, and up, down or an amount other than 0, not {body[:40]!r}")
    direction = "up" if amount > 0 else "down"
    point = _points(name, place, 1)[0]
    return {"action": "scroll", "coordinate": point, "direction": direction, "amount": abs(amount)}


def _read_hotkey(name: str, body: str) -> dict[str, Any]:
    return {"action": "key", "keys": [key.strip() for key in body.split(",")]}


def _read_press(name: str, body: str) -> dict[str, Any]:
    # press( ) is the space bar.
    return {"action": "key", "keys": [body.strip() or body]}


def _read_type(name: str, body: str) -> dict[str, Any]:
    return {"action": "type", "text": body}


def _written(one: Arguments) -> str:
    action = one["action"]
    point = ",".join(map(str, one.get("coordinate", ())))
    for name, meaning in _AT.items():
        if meaning == action:
            return f"{name}({point})"
    for name, meaning in _PLAIN.items():
        if action != "wait" and meaning == one:
            return f"{name}()"
    if action == "wait":
        return "wait()"
    if action == "type":
        return f"type({one['text']})"
    if action == "key":
        return f"press({one['keys'][0]})" if len(one["keys"]) == 1 else f"hotkey({','.join(one['keys'])})"
    if action == "left_click_drag":
        ends = (*one.get("start_coordinate", ()), *one["end_coordinate"])
        return f"drag({','.join(map(str, ends))})"
    assert action == "scroll", action
    amount = one["amount"] if one["direction"] == "up" else -one["amount"]
    how = one["direction"] if one["amount"] == SCROLL_CLICKS else amount
    return f"scroll({point},{how})"


_AT = {"click": "left_click", "left_double": "double_click", "right_single": "right_click", "move": "mouse_move"}
_PLAIN: Mapping[str, dict[str, Any]] = {
    "wait": {"action": "wait"},
    "call_user": {"action": "terminate", "status": "failure"},
    "finish": {"action": "terminate", "status": "success"},
}
_READERS: Mapping[str, Callable[[str, str], dict[str, Any]]] = {
    **dict.fromkeys(_AT, _read_point),
    "drag": _read_drag,
    "scroll": _read_scroll,
    "hotkey": _read_hotkey,
    "press": _read_press,
    "type": _read_type,
}
CALL_NAMES = (*_READERS, *_PLAIN)
_NAMES = "|".join(CALL_NAMES)
_CALL = re.compile(rf"(?P<name>{_NAMES})\((?P<body>.*)\)", re.DOTALL)
_JOIN = re.compile(rf"((?<=\))\s*&\s*(?=(?:{_NAMES})\())")

_PROMPT = """You operate a computer for the user. You see its screen as a screenshot, sometimes with its \
accessibility tree and the text of a terminal, and you act with mouse and keyboard.

Answer each observation in this form:
<|think_start|>what you see and what you do next<|think_end|><|action_start|>click(100,100)<|action_end|>

The calls:
- click(x,y), left_double(x,y), right_single(x,y), move(x,y)
- drag(x1,y1,x2,y2): from the first point to the second
- scroll(x,y,up), scroll(x,y,down), or a number of clicks: scroll(x,y,-5)
- type(text): as it stands, without quotes
- press(key): one key; hotkey(ctrl,s): several held together
- wait(): when the screen needs time
- finish(): when the task is done; call_user(): when it cannot be done
Several calls may be joined by &: click(100,100)&type(hello)&press(enter)

Rules:
- <coordinates> Aim at the middle of a target.
- Check the result on the screen before you finish."""
_PROMPTS = (_PROMPT, "You operate a computer. Answer with one call between the action tags.<coordinates>")

OSGYM = Grammar(
    name="osgym",
    stop=("<|action_end|>",),
    coordinate_space="thousand",
    vocabulary=Vocabulary(
        names=frozenset({*_AT.values(), "left_click_drag", "type", "key", "scroll", "wait", "terminate"}),
        takes_sequences=True,
    ),
    prompts=_PROMPTS,
    describe=describe,
    read=read,
    write=write,
)
