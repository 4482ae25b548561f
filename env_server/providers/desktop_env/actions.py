"""Converts an action's text to source for a desktop-env VM: generated from the parsed calls, never the text itself,
because desktop-env rewrites its input by pattern and so may turn a string into code."""

from typing import Any

from env_server.driving.pyautogui_calls import read_calls
from env_server.guest_client import GuestCall

_LESS = "pyautogui.hotkey('shift', ',')"
"""pyautogui types `>` for `<` on the layout of OSWorld's images; these keys type `<`."""


def source_of(text: str) -> str:
    """
    Raises:
        ActionParseError: it is not a sequence of known calls with literal arguments.
    """
    return "; ".join(_source_of_call(call) for call in read_calls(text))


def _source_of_call(call: GuestCall) -> str:
    kwargs = dict(call.kwargs or {})
    if call.name in ("write", "typewrite"):
        message = call.args[0] if call.args else kwargs.get("message")
        if isinstance(message, str) and "<" in message:
            interval = {"interval": call.args[1]} if len(call.args) > 1 else {}
            rest = interval | {key: value for key, value in kwargs.items() if key != "message"}
            pieces = [_written(call.name, (piece,), rest) if piece else "" for piece in message.split("<")]
            return "; ".join(part for piece in pieces for part in (_LESS, piece) if part)[len(_LESS) + 2 :]
    if call.name == "press" and call.args == ("<",) and not kwargs:
        return _LESS
    return _written(call.name, call.args, kwargs)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    owner = "time" if name == "sleep" else "pyautogui"
    arguments = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{owner}.{name}({', '.join(arguments)})"
