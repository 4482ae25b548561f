"""Recorded pyautogui code as actions of our dialect: one action per turn, equal to the code, or an error that names the
reason. The code is neither run nor guessed."""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from osworld_pipeline.dialects.slime_actions import normalise_action
from osworld_pipeline.domain.pyautogui import MAX_TEXT_CHARS, SPECIAL_ACTIONS, Call, parse_pyautogui
from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.errors import ActionParseError

Arguments = Mapping[str, Any]
"""An action in the dialect's normal form."""
ToPixels = Callable[[float, float], tuple[int, int]]
"""Converts a recorded point to the image of its step. Raises ActionParseError if it is outside."""

MAX_NUMBER = 2**53
MAX_REPEATS = 32
"""Presses of one key in one call; each becomes a separate turn."""
_FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)
_SPECIAL = {
    "WAIT": {"action": "wait"},
    "DONE": {"action": "terminate", "status": "success"},
    "FAIL": {"action": "terminate", "status": "failure"},
}
_CLICKS = {
    "click": "left_click",
    "leftClick": "left_click",
    "rightClick": "right_click",
    "middleClick": "middle_click",
    "doubleClick": "double_click",
    "tripleClick": "triple_click",
}
_POSITIONS = {
    "click": ("x", "y", "clicks", "interval", "button", "duration"),
    "doubleClick": ("x", "y", "interval", "button", "duration"),
    "tripleClick": ("x", "y", "interval", "button", "duration"),
    "dragTo": ("x", "y", "duration", "button"),
    "scroll": ("clicks", "x", "y"),
    "vscroll": ("clicks", "x", "y"),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "keyDown": ("key",),
    "keyUp": ("key",),
}
"""Names of arguments by position; for all other calls they begin with x and y."""


def read_code(code: str) -> tuple[Call, ...]:
    """The calls of a recorded step. WAIT, DONE and FAIL become a Call of that name. Of AgentNet's own calls
    `computer.wait` becomes WAIT, `computer.terminate` DONE or FAIL, and a click keeps its name.

    Raises:
        ActionParseError: anything other than known calls with literal arguments.
    """
    if len(code) > MAX_TEXT_CHARS:
        raise ActionParseError(f"the code has {len(code)} characters; at most {MAX_TEXT_CHARS} are read")
    calls: list[Call] = []
    for text in _pieces(_FENCE.sub("", code).strip()):
        calls += [Call(name=text)] if text in SPECIAL_ACTIONS else _computer_call(text) or parse_pyautogui(text)
    if not calls:
        raise ActionParseError("the step has no code")
    return tuple(calls)


def _pieces(code: str) -> Iterator[str]:
    """Splits the code into statements, because one step may contain two languages. Imports are dropped; text that is
    not Python is passed to the parser, which refuses it."""
    body: list[ast.stmt] | None = None
    for text in (code, "\n".join(line.strip() for line in code.splitlines())):
        with suppress(ValueError):
            body = parse_python(text).body
            break
    if body is None:
        yield code
        return
    for statement in body:
        if not isinstance(statement, ast.Import):
            try:
                yield ast.unparse(statement)
            except RecursionError as error:
                raise ActionParseError("the code is nested too deep") from error


def _computer_call(text: str) -> list[Call]:
    """AgentNet's own call; empty if the text is not one."""
    if not text.startswith("computer."):
        return []
    try:
        node = parse_python(text, "eval").body
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        args = tuple(ast.literal_eval(arg) for arg in node.args)
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, AssertionError, RecursionError, MemoryError) as error:
        raise ActionParseError(f"not a call with literal arguments: {text[:80]}") from error
    if node.func.attr == "wait":
        return [Call(name="WAIT")]
    if node.func.attr == "terminate":
        status = kwargs.get("status", args[0] if args else "success")
        if status not in ("success", "failure"):
            raise ActionParseError(f"a task can end with success or failure, not {str(status)[:40]!r}")
        return [Call(name="DONE" if status == "success" else "FAIL")]
    if node.func.attr in ("tripleClick", "doubleClick", "click"):
        return [Call(name=node.func.attr, args=args, kwargs=kwargs)]
    raise ActionParseError(f"computer.{node.func.attr[:40]} is not a known action")


@dataclass
class Pointer:
    """Position of the recorded pointer, and the held keys, across steps."""

    point: tuple[int, int] | None = None
    """Point in pixels of the step's image; None if unknown."""
    held: dict[str, bool] = field(default_factory=dict)
    """Keys that are held, in order, and whether another was pressed meanwhile."""


def actions_of(calls: Sequence[Call], to_pixels: ToPixels, pointer: Pointer) -> list[Arguments]:
    """The actions of one step, in order. Pauses next to other calls are dropped, because every turn has a pause of its
    own; a step with only a pause is a wait, and a click without a point is at the last known pointer position.

    Raises:
        ActionParseError: a call that no action can express, a call after the end of the task, a key that is held beyond
            the step, or calls without effect.
    """
    actions: list[Arguments] = []
    for call in calls:
        if actions and actions[-1]["action"] == "terminate":
            raise ActionParseError("there are calls after the end of the task")
        actions += [normalise_action(raw) for raw in _raw_actions(call, to_pixels, pointer)]
    if pointer.held:
        key = next(iter(pointer.held))
        raise ActionParseError(f"the key {key} is held beyond its step; no action holds a key across steps")
    if not actions and any(call.name == "sleep" for call in calls):
        return [{"action": "wait"}]
    if not actions:
        raise ActionParseError("the calls have no effect")
    return actions


def _raw_actions(call: Call, to_pixels: ToPixels, pointer: Pointer) -> list[dict[str, Any]]:
    named = _named(call)
    if call.name in _SPECIAL:
        return [_SPECIAL[call.name]]
    if call.name == "sleep":
        return []
    if call.name in ("press", "hotkey", "keyDown", "keyUp"):
        return _keys(call, named, pointer)
    if pointer.held:
        raise ActionParseError(f"{call.name} while the key {next(iter(pointer.held))} is held, which no action can do")
    if call.name in ("write", "typewrite"):
        message = named.get("message")
        if isinstance(message, tuple):
            return [{"action": "key", "keys": [key]} for key in message]
        return [{"action": "type", "text": message}] if message != "" else []
    if call.name in ("scroll", "vscroll"):
        return _scroll(named, to_pixels, pointer)
    if call.name in _CLICKS:
        action, point = _click_action(call, named), _point(call, named, to_pixels)
        pointer.point = point or pointer.point
        if pointer.point is None:
            raise ActionParseError(f"{call.name} without a point, and the position of the pointer is unknown")
        return [{"action": action, "coordinate": list(pointer.point)}]
    if call.name in ("moveTo", "dragTo"):
        if call.name == "dragTo" and named.get("button") not in (None, "left", "primary"):
            raise ActionParseError(f"a drag with the {named['button']} button is not an action")
        point = _point(call, named, to_pixels)
        if point is None:
            raise ActionParseError(f"{call.name} without a point")
        pointer.point = point
        key = "coordinate" if call.name == "moveTo" else "end_coordinate"
        return [{"action": "mouse_move" if call.name == "moveTo" else "left_click_drag", key: list(point)}]
    raise ActionParseError(f"pyautogui.{call.name} is not a known action")


def _named(call: Call) -> dict[str, Any]:
    names = _POSITIONS.get(call.name, ("x", "y"))
    if call.name == "hotkey":
        return dict(call.kwargs)
    # A point may be given as one pair.
    args = call.args
    if args and isinstance(args[0], tuple) and names[0] == "x":
        args = (*args[0], *args[1:])
    return dict(zip(names, args, strict=False)) | dict(call.kwargs)


def _point(call: Call, named: Mapping[str, Any], to_pixels: ToPixels) -> tuple[int, int] | None:
    x, y = named.get("x"), named.get("y")
    if x is None and y is None:
        return None
    if not _is_number(x) or not _is_number(y):
        raise ActionParseError(f"{call.name} at ({x}, {y}), which is not a point")
    return to_pixels(x, y)  # pyright: ignore[reportArgumentType]


def _click_action(call: Call, named: Mapping[str, Any]) -> str:
    button, clicks = named.get("button"), named.get("clicks", 1)
    if button in (None, "left", "primary"):
        counted = {1: _CLICKS[call.name], 2: "double_click", 3: "triple_click"}.get(_whole(clicks) or 0)
        if counted is not None:
            return counted
    elif call.name == "click" and _whole(clicks) == 1 and button in ("right", "secondary", "middle"):
        return "middle_click" if button == "middle" else "right_click"
    raise ActionParseError(f"{clicks} clicks with the {button or 'left'} button by {call.name} are not an action")


def _scroll(named: Mapping[str, Any], to_pixels: ToPixels, pointer: Pointer) -> list[dict[str, Any]]:
    amount = _whole(named.get("clicks"))
    if amount is None:
        raise ActionParseError(f"a scroll by {named.get('clicks')} is not an action")
    actions: list[dict[str, Any]] = []
    point = _point(Call(name="scroll"), named, to_pixels)
    if point is not None:
        pointer.point = point
        actions.append({"action": "mouse_move", "coordinate": list(point)})
    if amount:
        actions.append({"action": "scroll", "direction": "up" if amount > 0 else "down", "amount": abs(amount)})
    return actions


def _keys(call: Call, named: Mapping[str, Any], pointer: Pointer) -> list[dict[str, Any]]:
    """A key held while others are pressed forms a hotkey; a key held alone is a press."""
    if call.name == "keyDown":
        pointer.held[str(named.get("key"))] = False
        return []
    if call.name == "keyUp":
        key = str(named.get("key"))
        was_used = pointer.held.pop(key, True)
        return [] if was_used else [_pressed(pointer, [key])]
    if call.name == "hotkey":
        keys = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], tuple) else call.args
        return [_pressed(pointer, keys)]
    keys, presses = named.get("keys", named.get("key")), _whole(named.get("presses", 1))
    if presses is None or not 1 <= presses <= MAX_REPEATS:
        raise ActionParseError(f"a key is pressed {named.get('presses')} times; 1 to {MAX_REPEATS} are possible")
    once = keys if isinstance(keys, tuple) else (keys,)
    return [_pressed(pointer, [key]) for _ in range(presses) for key in once]


def _pressed(pointer: Pointer, keys: Sequence[Any]) -> dict[str, Any]:
    action = {"action": "key", "keys": [*pointer.held, *keys]}
    pointer.held = dict.fromkeys(pointer.held, True)
    return action


def _whole(value: Any) -> int | None:
    return int(value) if _is_number(value) and value == int(value) else None


def _is_number(value: Any) -> bool:
    """Whether it is a finite number; an integer that no float represents exactly is no valid coordinate or count."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MAX_NUMBER if isinstance(value, int) else math.isfinite(value)
