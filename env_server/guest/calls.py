"""The calls with pyautogui's names that /act executes. All are checked first, so a refused list has no effect."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .keys import keysym_of_char, keysym_of_key

MAX_SLEEP_S = 60.0
MAX_REPEATS = 1000
MAX_TEXT = 20_000
_BUTTONS = ("left", "middle", "right", "primary", "secondary", 1, 2, 3)

_POINT = ("x", "y")
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "click": (*_POINT, "clicks", "interval", "button", "duration"),
    "leftClick": (*_POINT, "interval", "duration"),
    "rightClick": (*_POINT, "interval", "duration"),
    "middleClick": (*_POINT, "interval", "duration"),
    "doubleClick": (*_POINT, "interval", "button", "duration"),
    "tripleClick": (*_POINT, "interval", "button", "duration"),
    "moveTo": (*_POINT, "duration"),
    "move": ("xOffset", "yOffset", "duration"),
    "moveRel": ("xOffset", "yOffset", "duration"),
    "dragTo": (*_POINT, "duration", "button", "mouseDownUp"),
    "drag": ("xOffset", "yOffset", "duration", "button", "mouseDownUp"),
    "dragRel": ("xOffset", "yOffset", "duration", "button", "mouseDownUp"),
    "mouseDown": (*_POINT, "button", "duration"),
    "mouseUp": (*_POINT, "button", "duration"),
    "scroll": ("clicks", *_POINT),
    "vscroll": ("clicks", *_POINT),
    "hscroll": ("clicks", *_POINT),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "keyDown": ("key",),
    "keyUp": ("key",),
    "sleep": ("seconds",),
}
_REQUIRED = {
    "moveTo": _POINT[:1], "move": ("xOffset",), "moveRel": ("xOffset",), "dragTo": _POINT, "drag": ("xOffset",),
    "dragRel": ("xOffset",), "scroll": ("clicks",), "vscroll": ("clicks",), "hscroll": ("clicks",),
    "write": ("message",), "typewrite": ("message",), "press": ("keys",), "keyDown": ("key",), "keyUp": ("key",),
    "sleep": ("seconds",),
}  # fmt: skip
_IGNORED = {"logScreenshot", "_pause", "tween"}
"""Arguments of pyautogui that have no effect here."""

CALL_NAMES = (*_SIGNATURES, "hotkey")


def bind_call(call: Any) -> tuple[str, dict[str, Any]]:
    """A call as (name, arguments by name). ValueError if it is invalid."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise ValueError("a call must be {name, args, kwargs}")
    name, args, kwargs = call["name"], list(call.get("args") or ()), dict(call.get("kwargs") or {})
    if name not in CALL_NAMES:
        raise ValueError(f"there is no call {name!r}; known: {', '.join(sorted(CALL_NAMES))}")
    kwargs = {key: value for key, value in kwargs.items() if key not in _IGNORED}
    if name == "hotkey":
        return name, _bind_hotkey(args, kwargs)
    names = _SIGNATURES[name]
    if len(args) == 1 and names[:2] == _POINT and isinstance(args[0], list | tuple):
        args = list(args[0])
    if len(args) > len(names):
        raise ValueError(f"{name} takes at most {len(names)} arguments, not {len(args)}")
    bound = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        if key not in names or key in bound:
            raise ValueError(f"{name} does not take {key!r}" + (" twice" if key in bound else ""))
        bound[key] = value
    missing = [key for key in _REQUIRED.get(name, ()) if bound.get(key) is None]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    _check_values(name, bound)
    return name, bound


def _bind_hotkey(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) == 1 and isinstance(args[0], list | tuple):
        args = list(args[0])
    if set(kwargs) - {"interval"}:
        raise ValueError(f"hotkey does not take {sorted(set(kwargs) - {'interval'})[0]!r}")
    if not args:
        raise ValueError("hotkey lacks keys")
    bound = {"keys": list(args), "interval": kwargs.get("interval")}
    _check_values("hotkey", bound)
    return bound


def _check_values(name: str, bound: dict[str, Any]) -> None:
    for key in ("x", "y", "xOffset", "yOffset", "interval", "duration", "seconds"):
        _check_number(name, key, bound.get(key))
    for key in ("interval", "duration", "seconds"):
        if not 0 <= (bound.get(key) or 0) <= MAX_SLEEP_S:
            raise ValueError(f"{name}: {key} must be 0 to {MAX_SLEEP_S:g} seconds")
    for key in ("clicks", "presses"):
        value = bound.get(key)
        _check_number(name, key, value)
        if value is not None and abs(value) > MAX_REPEATS:
            raise ValueError(f"{name}: {key} must be at most {MAX_REPEATS}")
    if bound.get("button", "left") not in _BUTTONS:
        raise ValueError(f"{name}: button must be left, middle or right, not {bound['button']!r}")
    for key in ("keys", "key"):
        if key in bound:
            keys = bound[key] if isinstance(bound[key], list | tuple) else [bound[key]]
            if not keys or not all(isinstance(item, str) and item for item in keys):
                raise ValueError(f"{name}: {key} must be key names")
            for item in keys:
                keysym_of_key(item)
    if "message" in bound:
        _check_message(name, bound["message"])


def _check_message(name: str, message: Any) -> None:
    if isinstance(message, list | tuple):
        for item in message:
            if not isinstance(item, str):
                raise ValueError(f"{name}: a list must hold key names")
            keysym_of_key(item)
        return
    if not isinstance(message, str) or len(message) > MAX_TEXT:
        raise ValueError(f"{name}: the text must be a string of at most {MAX_TEXT} characters")
    for char in message:
        keysym_of_char(char)


def _check_number(name: str, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise ValueError(f"{name}: {key} must be a number between -1e6 and 1e6, not {value!r}")


def perform_calls(device: Any, calls: Sequence[Any]) -> None:
    """Checks all calls, then performs them on an `xinput.Input`."""
    bound_calls = [bind_call(call) for call in calls]
    for name, bound in bound_calls:
        perform_call(device, name, bound)


def perform_call(device: Any, name: str, bound: Mapping[str, Any]) -> None:
    """Performs one bound call."""
    handler = _HANDLERS.get(name)
    if handler is not None:
        handler(device, bound)
    else:
        _click(device, name, bound)


def _click(device: Any, name: str, bound: Mapping[str, Any]) -> None:
    button = {"rightClick": "right", "middleClick": "middle"}.get(name, bound.get("button") or "left")
    clicks = {"doubleClick": 2, "tripleClick": 3}.get(name, bound.get("clicks"))
    _move_to(device, bound)
    device.click(button, clicks=1 if clicks is None else int(clicks), interval_s=bound.get("interval") or 0.0)


def _move_to(device: Any, bound: Mapping[str, Any]) -> None:
    if bound.get("x") is not None or bound.get("y") is not None:
        device.move(bound.get("x"), bound.get("y"), duration_s=bound.get("duration") or 0.0)


def _offset(device: Any, bound: Mapping[str, Any]) -> tuple[float, float]:
    x, y = device.position()
    return x + (bound.get("xOffset") or 0), y + (bound.get("yOffset") or 0)


def _move_by(device: Any, bound: Mapping[str, Any]) -> None:
    device.move(*_offset(device, bound), duration_s=bound.get("duration") or 0.0)


def _drag_to(device: Any, bound: Mapping[str, Any]) -> None:
    _drag(device, (bound["x"], bound["y"]), bound)


def _drag_by(device: Any, bound: Mapping[str, Any]) -> None:
    _drag(device, _offset(device, bound), bound)


def _drag(device: Any, point: tuple[float, float], bound: Mapping[str, Any]) -> None:
    duration_s = bound.get("duration") or 0.0
    if bound.get("mouseDownUp") is False:
        device.move(*point, duration_s=duration_s)
    else:
        device.drag(*point, bound.get("button") or "left", duration_s=duration_s)


def _button(*, down: bool) -> Callable[[Any, Mapping[str, Any]], None]:
    def handle(device: Any, bound: Mapping[str, Any]) -> None:
        _move_to(device, bound)
        device.button(bound.get("button") or "left", down=down)

    return handle


def _wheel(*, horizontal: bool) -> Callable[[Any, Mapping[str, Any]], None]:
    def handle(device: Any, bound: Mapping[str, Any]) -> None:
        _move_to(device, bound)
        device.wheel(int(bound["clicks"]), horizontal=horizontal)

    return handle


def _write(device: Any, bound: Mapping[str, Any]) -> None:
    if isinstance(bound["message"], str):
        device.write(bound["message"], interval_s=bound.get("interval") or 0.0)
    else:
        device.press(list(bound["message"]), interval_s=bound.get("interval") or 0.0)


def _press(device: Any, bound: Mapping[str, Any]) -> None:
    keys = [bound["keys"]] if isinstance(bound["keys"], str) else list(bound["keys"])
    presses = bound.get("presses")
    device.press(keys, presses=1 if presses is None else int(presses), interval_s=bound.get("interval") or 0.0)


_HANDLERS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "moveTo": _move_to,
    "move": _move_by,
    "moveRel": _move_by,
    "dragTo": _drag_to,
    "drag": _drag_by,
    "dragRel": _drag_by,
    "mouseDown": _button(down=True),
    "mouseUp": _button(down=False),
    "scroll": _wheel(horizontal=False),
    "vscroll": _wheel(horizontal=False),
    "hscroll": _wheel(horizontal=True),
    "write": _write,
    "typewrite": _write,
    "press": _press,
    "hotkey": lambda device, bound: device.hotkey(bound["keys"], interval_s=bound.get("interval") or 0.0),
    "keyDown": lambda device, bound: device.key(bound["key"], down=True),
    "keyUp": lambda device, bound: device.key(bound["key"], down=False),
    "sleep": lambda device, bound: time.sleep(bound["seconds"]),
}
