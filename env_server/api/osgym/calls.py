"""Translates OSGym's action language, such as `click(10,20)`, into the pyautogui calls that every driver accepts.

Arguments are unquoted between the parentheses, and several calls may be joined by `&`. Typed text may also contain
commas, parentheses and `&`, so a call ends only where `)` is followed by the end, or by `&` and another known call."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from osworld_pipeline.domain.pyautogui import MAX_CALLS, MAX_TEXT_CHARS
from osworld_pipeline.errors import ActionParseError

SCROLL_CLICKS = 50
"""The amount that OSGym's client sends for `up`; it sends the negative for `down`."""
DRAG_S = 0.5
WAIT_S = 2.0
"""Duration of a `wait()` between other calls."""
MAX_COORDINATE = 100_000

Ending = Literal["WAIT", "DONE", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class OsgymAction:
    """`calls` are pyautogui's, or empty; `ending` is the special action of the step in addition to them."""

    calls: str = ""
    ending: Ending | None = None

    @property
    def is_final(self) -> bool:
        return self.ending in ("DONE", "FAIL")


def read_osgym_action(text: str) -> OsgymAction:
    """
    Raises:
        ActionParseError: it does not consist only of known calls; no part of it may be executed.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ActionParseError(f"an action of {len(text)} characters is too long; the limit is {MAX_TEXT_CHARS}")
    calls = _read_joined(text.strip())
    for name, _ in calls[:-1]:
        if name in ("finish", "call_user"):
            raise ActionParseError(f"{name}() ends the episode; no call can follow it")
    ending = _ENDINGS.get(calls[-1][0])
    if ending is None or (ending == "WAIT" and len(calls) > 1):
        return OsgymAction(calls="\n".join(translated for _, translated in calls))
    return OsgymAction(calls="\n".join(translated for _, translated in calls[:-1]), ending=ending)


def _read_joined(text: str) -> list[tuple[str, str]]:
    """(name, pyautogui source) of each joined call. Text after `type(` that cannot be parsed as a call is typed text,
    including its `&`."""
    first, *others = _JOIN.split(text)
    raw = [[first]]
    for joint, piece in zip(others[::2], others[1::2], strict=True):
        try:
            _read_call(piece)
        except ActionParseError:
            if not raw[-1][0].startswith("type("):
                raise
            raw[-1] += (joint, piece)
        else:
            raw.append([piece])
    if len(raw) > MAX_CALLS:
        raise ActionParseError(f"{len(raw)} calls in one action are too many; the limit is {MAX_CALLS}")
    return [_read_call("".join(parts)) for parts in raw]


def _read_call(text: str) -> tuple[str, str]:
    match = _CALL.fullmatch(text)
    if match is None:
        raise ActionParseError(
            f"the action {text[:80]!r} is not an OSGym call; known: {', '.join(f'{name}()' for name in CALL_NAMES)}"
        )
    name, body = match["name"], match["body"]
    if name not in _ENDINGS:
        return name, _CALLS[name](body)
    if body.strip():
        raise ActionParseError(f"{name}() takes no arguments, not {body[:40]!r}")
    return name, f"time.sleep({WAIT_S:g})"


def _numbers(name: str, body: str, names: str) -> list[int]:
    values = [part.strip() for part in body.split(",")]
    wanted = names.split(",")
    if len(values) != len(wanted) or not all(_INTEGER.fullmatch(value) for value in values):
        raise ActionParseError(f"{name}: expected whole numbers for {names}, not {body[:40]!r}")
    numbers = [int(value) for value in values]
    if any(abs(number) > MAX_COORDINATE for number in numbers):
        raise ActionParseError(f"{name}: a number is out of range in {body[:40]!r}")
    return numbers


def _at(name: str, call: str) -> Callable[[str], str]:
    def read(body: str) -> str:
        x, y = _numbers(name, body, "x,y")
        return f"pyautogui.{call}({x}, {y})"

    return read


def _drag(body: str) -> str:
    x1, y1, x2, y2 = _numbers("drag", body, "x1,y1,x2,y2")
    return f"pyautogui.moveTo({x1}, {y1})\npyautogui.dragTo({x2}, {y2}, duration={DRAG_S:g}, button='left')"


def _scroll(body: str) -> str:
    point, separator, how = body.rpartition(",")
    words: Mapping[str, int] = {"up": SCROLL_CLICKS, "down": -SCROLL_CLICKS}
    amount = words.get(how.strip().lower())
    if amount is None and separator:
        (amount,) = _numbers("scroll", how, "amount")
    if amount is None:
        raise ActionParseError(f"expected scroll(x,y,up|down or an amount), not {body[:40]!r}")
    x, y = _numbers("scroll", point, "x,y")
    return f"pyautogui.moveTo({x}, {y})\npyautogui.scroll({amount})"


def _hotkey(body: str) -> str:
    keys = [key.strip() for key in body.split(",")]
    if not all(keys):
        raise ActionParseError(f"hotkey(key,key,...) needs key names, not {body[:40]!r}")
    return f"pyautogui.hotkey({', '.join(map(repr, keys))})"


def _press(body: str) -> str:
    key = body.strip() or body  # press( ) is the space bar
    if not key:
        raise ActionParseError("press(key) needs a key name")
    return f"pyautogui.press({key!r})"


_CALLS: Mapping[str, Callable[[str], str]] = {
    "click": _at("click", "click"),
    "left_double": _at("left_double", "doubleClick"),
    "right_single": _at("right_single", "rightClick"),
    "move": _at("move", "moveTo"),
    "drag": _drag,
    "scroll": _scroll,
    "hotkey": _hotkey,
    "press": _press,
    "type": lambda body: f"pyautogui.write({body!r})",
}
_ENDINGS: Mapping[str, Ending] = {"wait": "WAIT", "call_user": "FAIL", "finish": "DONE"}
CALL_NAMES = (*_CALLS, *_ENDINGS)
_NAMES = "|".join(CALL_NAMES)
_CALL = re.compile(rf"(?P<name>{_NAMES})\((?P<body>.*)\)", re.DOTALL)
_JOIN = re.compile(rf"((?<=\))\s*&\s*(?=(?:{_NAMES})\())")
_INTEGER = re.compile(r"[+-]?\d{1,6}", re.ASCII)
