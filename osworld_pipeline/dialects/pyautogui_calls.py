"""Converts parsed pyautogui calls to actions, which are not normalised yet."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from osworld_pipeline.domain.pyautogui import Call
from osworld_pipeline.errors import ActionParseError

_CLICKS = {
    "click": "left_click",
    "leftClick": "left_click",
    "rightClick": "right_click",
    "middleClick": "middle_click",
    "doubleClick": "double_click",
    "tripleClick": "triple_click",
}
_BY_COUNT = {1: "left_click", 2: "double_click", 3: "triple_click"}
_PARAMETERS = {
    "click": ("x", "y", "clicks", "interval", "button"),
    "dragTo": ("x", "y", "duration", "tween", "button"),
    "mouseDown": ("x", "y", "button"),
    "mouseUp": ("x", "y", "button"),
    "scroll": ("clicks", "x", "y"),
    "vscroll": ("clicks", "x", "y"),
    "hscroll": ("clicks", "x", "y"),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "keyDown": ("key",),
    "keyUp": ("key",),
    "sleep": ("seconds",),
}
"""Names of positional arguments; those of every other call begin with x and y."""
_BUTTONS = {"primary": "left", "secondary": "right"}
MAX_PRESSES = 32


def actions_of(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """The actions of the calls, in order; not normalised yet.

    Raises:
        ActionParseError: no action can express a call; names the call.
    """
    return [action for call in calls for action in _read(call)]


def _read(call: Call) -> list[dict[str, Any]]:
    named = _named(call)
    if call.name in _CLICKS:
        return [{"action": _click_action(call.name, named), **_place(named)}]
    if call.name == "moveTo":
        return [{"action": "mouse_move", "coordinate": _place(named).get("coordinate")}]
    if call.name == "dragTo":
        if _button(named) != "left":
            raise ActionParseError("a drag needs the left button")
        return [{"action": "left_click_drag", "end_coordinate": _place(named).get("coordinate")}]
    reader = _READERS.get(call.name)
    if reader is None:
        raise ActionParseError(f"pyautogui.{call.name} is not one of the actions; give places as coordinates")
    return reader(call, named)


def _named(call: Call) -> dict[str, Any]:
    if call.name == "hotkey":
        return dict(call.kwargs)
    names = _PARAMETERS.get(call.name, ("x", "y"))
    args = call.args
    # A point may be given as a pair.
    if args and isinstance(args[0], tuple) and names[0] == "x":
        args = (*args[0], *args[1:])
    return dict(zip(names, args, strict=False)) | dict(call.kwargs)


def _place(named: Mapping[str, Any]) -> dict[str, Any]:
    x, y = named.get("x"), named.get("y")
    if isinstance(x, tuple) and y is None:
        return {"coordinate": list(x)}
    return {} if x is None and y is None else {"coordinate": [x, y]}


def _button(named: Mapping[str, Any]) -> Any:
    button = named.get("button", "left")
    return _BUTTONS.get(button, button) if isinstance(button, str) else button


def _click_action(name: str, named: Mapping[str, Any]) -> str:
    button, clicks = _button(named), named.get("clicks", 1)
    action = _CLICKS[name]
    if name not in ("click", "leftClick"):
        return action
    if button == "left" and clicks in _BY_COUNT:
        return _BY_COUNT[clicks]
    if button in ("right", "middle") and clicks == 1:
        return f"{button}_click"
    raise ActionParseError(f"{clicks} clicks with the {button} button are not one of the actions")


def _mouse(action: str) -> Callable[[Call, Mapping[str, Any]], list[dict[str, Any]]]:
    return lambda call, named: [{"action": action, "button": _button(named), **_place(named)}]


def _scroll(call: Call, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    clicks = named.get("clicks")
    if not isinstance(clicks, int | float) or isinstance(clicks, bool) or not math.isfinite(clicks) or not clicks:
        raise ActionParseError(f"{call.name} takes a number of clicks that is not 0")
    horizontal = call.name == "hscroll"
    forward, back = ("right", "left") if horizontal else ("up", "down")
    direction = forward if clicks > 0 else back
    action = "hscroll" if horizontal else "scroll"
    return [{"action": action, "direction": direction, "amount": abs(clicks), **_place(named)}]


def _write(call: Call, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    message = named.get("message")
    if isinstance(message, tuple):
        return [{"action": "key", "keys": [key]} for key in message]
    return [{"action": "type", "text": message}]


def _press(call: Call, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys, presses = named.get("keys", named.get("key")), named.get("presses", 1)
    if not isinstance(presses, int) or isinstance(presses, bool) or not 1 <= presses <= MAX_PRESSES:
        raise ActionParseError(f"a key is pressed 1 to {MAX_PRESSES} times, not {presses}")
    once = keys if isinstance(keys, tuple) else (keys,)
    return [{"action": "key", "keys": [key]} for _ in range(presses) for key in once]


def _hotkey(call: Call, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], tuple) else call.args
    return [{"action": "key", "keys": list(keys)}]


_READERS: Mapping[str, Callable[[Call, Mapping[str, Any]], list[dict[str, Any]]]] = {
    "mouseDown": _mouse("mouse_down"),
    "mouseUp": _mouse("mouse_up"),
    "scroll": _scroll,
    "vscroll": _scroll,
    "hscroll": _scroll,
    "write": _write,
    "typewrite": _write,
    "press": _press,
    "hotkey": _hotkey,
    "keyDown": lambda call, named: [{"action": "key_down", "keys": [named.get("key")]}],
    "keyUp": lambda call, named: [{"action": "key_up", "keys": [named.get("key")]}],
    "sleep": lambda call, named: [{"action": "wait", "seconds": named.get("seconds", named.get("secs"))}],
}
