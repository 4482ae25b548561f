"""Translates actions to desktop commands: calls of pyautogui and time.sleep, one per line, or WAIT, DONE, FAIL."""

from osworld_pipeline.dialects.actions import Arguments, actions_in, literal
from osworld_pipeline.dialects.coordinates import ScalePoint

POINT_FUNCTIONS = {
    "left_click": "click",
    "right_click": "rightClick",
    "middle_click": "middleClick",
    "double_click": "doubleClick",
    "triple_click": "tripleClick",
    "mouse_move": "moveTo",
}
"""Actions that are one call at one point."""
ENDINGS = ("DONE", "FAIL")


def to_command(arguments: Arguments, scale: ScalePoint | None = None) -> str:
    """The calls of an action in normal form, or WAIT, DONE, FAIL; `scale` maps its points to the screen. A sequence
    that ends the task has DONE or FAIL as its last line (`split_command`)."""
    return "\n".join(line for one in actions_in(arguments) for line in _lines(one, scale))


def split_command(command: str) -> tuple[str, ...]:
    """The commands to send in order: all calls as one command, then the DONE or FAIL that ends the task."""
    *calls, last = command.split("\n")
    return ("\n".join(calls), last) if calls and last in ENDINGS else (command,)


def _lines(one: Arguments, scale: ScalePoint | None) -> list[str]:
    action = one["action"]
    place = _at(one.get("coordinate"), scale)
    if action in POINT_FUNCTIONS:
        return [f"pyautogui.{POINT_FUNCTIONS[action]}({place})"]
    if action in ("mouse_down", "mouse_up"):
        move = [f"pyautogui.moveTo({place})"] if place else []
        return [*move, f"pyautogui.{'mouseDown' if action == 'mouse_down' else 'mouseUp'}(button={one['button']!r})"]
    if action == "left_click_drag":
        start = [f"pyautogui.moveTo({_at(one['start_coordinate'], scale)})"] if "start_coordinate" in one else []
        return [*start, f"pyautogui.dragTo({_at(one['end_coordinate'], scale)})"]
    if action == "type":
        return [f"pyautogui.write({literal(one['text'])})"]
    if action in ("key", "key_down", "key_up"):
        function = {"key_down": "keyDown", "key_up": "keyUp"}.get(
            action, "press" if len(one["keys"]) == 1 else "hotkey"
        )
        return [f"pyautogui.{function}({', '.join(literal(key) for key in one['keys'])})"]
    if action in ("scroll", "hscroll"):
        move = [f"pyautogui.moveTo({place})"] if place else []
        amount = -one["amount"] if one["direction"] in ("down", "left") else one["amount"]
        return [*move, f"pyautogui.{action}({amount})"]
    if action == "wait":
        return [f"time.sleep({one['seconds']:g})"] if "seconds" in one else ["WAIT"]
    assert action == "terminate", action
    return ["DONE" if one["status"] == "success" else "FAIL"]


def _at(point: list[int | float] | None, scale: ScalePoint | None) -> str:
    if point is None:
        return ""
    x, y = scale(point[0], point[1]) if scale else (point[0], point[1])
    return f"{x}, {y}"
