"""The actions of the `computer_use` tool: their normal form, and their translation to pyautogui commands and back."""

import ast
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from osworld_pipeline.agent.dialects.base import ScalePoint
from osworld_pipeline.errors import ActionParseError

POINT_FUNCTIONS = {
    "left_click": "click",
    "right_click": "rightClick",
    "middle_click": "middleClick",
    "double_click": "doubleClick",
    "triple_click": "tripleClick",
    "mouse_move": "moveTo",
}
"""Actions that are one call at one point."""
MAX_COORDINATE = 100_000
MAX_SCROLL = 1_000

KEY_ALIASES = {
    "control": "ctrl",
    "control_l": "ctrl",
    "control_r": "ctrlright",
    "escape": "esc",
    "return": "enter",
    "super": "win",
    "super_l": "win",
    "meta": "win",
    "cmd": "win",
    "windows": "win",
    "alt_l": "alt",
    "shift_l": "shift",
    "page_up": "pageup",
    "page_down": "pagedown",
    "prior": "pageup",
    "next": "pagedown",
    "back_space": "backspace",
    "del": "delete",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    "spacebar": "space",
    "caps_lock": "capslock",
    "print_screen": "printscreen",
}
KEY_NAMES = frozenset(
    (
        *("alt", "altleft", "altright", "ctrl", "ctrlleft", "ctrlright", "shift", "shiftleft", "shiftright"),
        *("win", "winleft", "winright", "menu", "apps", "esc", "enter", "tab", "space", "backspace", "delete"),
        *("insert", "home", "end", "pageup", "pagedown", "up", "down", "left", "right"),
        *("capslock", "numlock", "scrolllock", "pause", "printscreen"),
    )
) | {f"f{number}" for number in range(1, 25)}


def normalise_action(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The action in its one normal form: known keys only, integer coordinates, lower-case key names.

    Raises:
        ActionParseError: unknown action, or an argument missing or of the wrong kind; names it.
    """
    action = raw.get("action")
    if not isinstance(action, str):
        raise ActionParseError("the tool call has no 'action'")
    action = action.strip().lower()
    normaliser = _NORMALISERS.get(action)
    if normaliser is None:
        raise ActionParseError(f"unknown action '{action[:40]}'; there are: {', '.join(sorted(_NORMALISERS))}")
    return {"action": action, **normaliser(raw)}


def _coordinate(raw: Mapping[str, Any], key: str = "coordinate") -> dict[str, Any]:
    value = raw.get(key)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ActionParseError(f"'{key}' must be [x, y]")
    point: list[int] = []
    for number in value:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or not 0 <= number <= MAX_COORDINATE:
            raise ActionParseError(f"'{key}' must hold two numbers from 0 to {MAX_COORDINATE}")
        point.append(round(number))
    return {key: point}


def _drag(raw: Mapping[str, Any]) -> dict[str, Any]:
    return _coordinate(raw if "end_coordinate" in raw else {"end_coordinate": raw.get("coordinate")}, "end_coordinate")


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    text = raw.get("text")
    if not isinstance(text, str) or not text:
        raise ActionParseError("'type' needs a 'text' that is not empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ActionParseError("'text' holds half a character (a lone surrogate)")
    return {"text": text}


def normalise_key(name: str) -> str:
    """pyautogui's name of a key; single characters stay as they are.

    Raises:
        ActionParseError: no such key.
    """
    if len(name) == 1 and name.isprintable() and name != " ":
        return name
    lowered = name.strip().lower() if name != " " else "space"
    lowered = KEY_ALIASES.get(lowered, lowered)
    if lowered not in KEY_NAMES:
        raise ActionParseError(f"unknown key '{name[:40]}'")
    return lowered


def _keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    keys = raw.get("keys", raw.get("key"))
    if isinstance(keys, str):
        keys = [keys] if len(keys) == 1 else [part for part in keys.split("+") if part]
    if not isinstance(keys, list | tuple) or not 1 <= len(keys) <= 8 or not all(isinstance(key, str) for key in keys):
        raise ActionParseError("'key' needs 'keys', a list of one to eight key names")
    return {"keys": [normalise_key(key) for key in keys]}


def _scroll(raw: Mapping[str, Any]) -> dict[str, Any]:
    direction = raw.get("direction")
    if direction not in ("up", "down"):
        raise ActionParseError("'direction' of a scroll must be up or down")
    amount = raw.get("amount", 3)
    if not isinstance(amount, int | float) or isinstance(amount, bool) or not 1 <= amount <= MAX_SCROLL:
        raise ActionParseError(f"'amount' of a scroll must be a number from 1 to {MAX_SCROLL}")
    return {"direction": direction, "amount": round(amount)}


def _status(raw: Mapping[str, Any]) -> dict[str, Any]:
    status = raw.get("status", "success")
    if status not in ("success", "failure"):
        raise ActionParseError("'status' must be success or failure")
    return {"status": status}


_NORMALISERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(POINT_FUNCTIONS, _coordinate),
    "left_click_drag": _drag,
    "type": _text,
    "key": _keys,
    "scroll": _scroll,
    "wait": lambda raw: {},
    "terminate": _status,
}
ACTION_NAMES = tuple(_NORMALISERS)


def to_command(arguments: Mapping[str, Any], scale: ScalePoint | None = None) -> str:
    """The pyautogui call, or WAIT, DONE, FAIL, of an action in normal form; `scale` maps its point to the screen."""
    action = arguments["action"]
    if action in POINT_FUNCTIONS:
        x, y = _scaled(arguments["coordinate"], scale)
        return f"pyautogui.{POINT_FUNCTIONS[action]}({x}, {y})"
    if action == "left_click_drag":
        x, y = _scaled(arguments["end_coordinate"], scale)
        return f"pyautogui.dragTo({x}, {y})"
    if action == "type":
        return f"pyautogui.write({_literal(arguments['text'])})"
    if action == "key":
        function = "press" if len(arguments["keys"]) == 1 else "hotkey"
        return f"pyautogui.{function}({', '.join(_literal(key) for key in arguments['keys'])})"
    if action == "scroll":
        amount = arguments["amount"]
        return f"pyautogui.scroll({-amount if arguments['direction'] == 'down' else amount})"
    if action == "wait":
        return "WAIT"
    assert action == "terminate", action
    return "DONE" if arguments["status"] == "success" else "FAIL"


def _scaled(point: list[int], scale: ScalePoint | None) -> tuple[int, int]:
    return scale(point[0], point[1]) if scale else (point[0], point[1])


def _literal(text: str) -> str:
    # JSON's escapes are a subset of Python's once characters beyond ASCII stay as they are.
    return json.dumps(text, ensure_ascii=False)


def action_from_call(source: str) -> dict[str, Any]:
    """The action a `pyautogui.f(...)` call with literal arguments means, so that every turn has one form.

    Raises:
        ActionParseError: not such a call, or one that no action of ours can express.
    """
    try:
        node = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ActionParseError("the pyautogui call is not Python") from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        raise ActionParseError("not a call of a pyautogui function")
    if not isinstance(node.func.value, ast.Name) or node.func.value.id != "pyautogui":
        raise ActionParseError("not a call of a pyautogui function")
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ActionParseError(f"pyautogui.{node.func.attr} may only have literal arguments") from error
    return normalise_action(_action_of(node.func.attr, args, named))


_POINT_ACTIONS = {function: action for action, function in POINT_FUNCTIONS.items()}


def _action_of(function: str, args: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    def argument(index: int, *names: str) -> Any:
        return args[index] if index < len(args) else next((named[name] for name in names if name in named), None)

    if function == "leftClick" or function in _POINT_ACTIONS:
        action = _POINT_ACTIONS.get(function, "left_click")
        if function == "click" and named.get("button") in ("right", "middle"):
            action = f"{named['button']}_click"
        if function == "click" and argument(2, "clicks") in (2, 3):
            action = "double_click" if argument(2, "clicks") == 2 else "triple_click"
        x = argument(0, "x")
        return {"action": action, "coordinate": list(x) if isinstance(x, tuple) else [x, argument(1, "y")]}
    if function == "dragTo":
        return {"action": "left_click_drag", "end_coordinate": [argument(0, "x"), argument(1, "y")]}
    if function in ("write", "typewrite"):
        return {"action": "type", "text": argument(0, "message")}
    if function == "press":
        return {"action": "key", "keys": [argument(0, "keys", "key")]}
    if function == "hotkey":
        return {"action": "key", "keys": args}
    if function == "scroll":
        clicks = argument(0, "clicks")
        if isinstance(clicks, int | float) and clicks:
            return {"action": "scroll", "direction": "up" if clicks > 0 else "down", "amount": abs(clicks)}
    raise ActionParseError(f"pyautogui.{function[:40]} with these arguments is none of the actions")
