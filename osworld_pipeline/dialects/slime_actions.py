"""The actions of Slime-OSWorld's tool `computer_use`, and the pyautogui calls that the lenient parser maps to them."""

import ast
from collections.abc import Mapping
from typing import Any

from osworld_pipeline.dialects.actions import CLICKS, Vocabulary, normalise
from osworld_pipeline.dialects.commands import POINT_FUNCTIONS
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.errors import ActionParseError

SLIME_VOCABULARY = Vocabulary(
    names=frozenset({*CLICKS, "mouse_move", "left_click_drag", "type", "key", "scroll", "wait", "terminate"}),
    takes_sequences=False,
)


def normalise_action(raw: Mapping[str, Any], space: CoordinateSpace = "model_pixels") -> dict[str, Any]:
    """One action of the tool in normal form: known keys only, rounded coordinates (integers, except in the space
    `unit`), lower-case key names.

    Raises:
        ActionParseError: the action is unknown, or an argument is missing or of the wrong kind; names it.
    """
    return normalise(raw, space=space, vocabulary=SLIME_VOCABULARY)


def action_from_call(source: str, space: CoordinateSpace = "model_pixels") -> dict[str, Any]:
    """The action of a `pyautogui.f(...)` call with literal arguments, so that every turn has one form.

    Raises:
        ActionParseError: it is not such a call, or no action can express it.
    """
    try:
        node = parse_python(source.strip(), "eval").body
    except ValueError as error:
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
    return normalise_action(_action_of(node.func.attr, args, named), space)


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
    raise ActionParseError(f"pyautogui.{function[:40]} with these arguments is not one of the actions")
