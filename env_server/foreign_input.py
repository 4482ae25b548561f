"""Input for guests that only have OSWorld's protocol: checked calls, written as the pyautogui program that such a guest
runs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from env_server.guest.calls import bind_call
from osworld_pipeline.errors import ActionParseError

_HEAD = "import pyautogui, time; pyautogui.FAILSAFE = False"


class Call(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> Mapping[str, Any] | None: ...


def pyautogui_program(calls: Sequence[Call]) -> str:
    """
    Raises:
        ActionParseError: a call is unknown, or its arguments are not literals.
    """
    lines = [_HEAD]
    for call in calls:
        try:
            name, bound = bind_call({"name": call.name, "args": call.args, "kwargs": call.kwargs})
        except (ValueError, TypeError) as error:
            raise ActionParseError(str(error)) from error
        lines += _lines(name, bound)
    return "\n".join(lines)


def _lines(name: str, bound: Mapping[str, Any]) -> list[str]:
    if name == "sleep":
        return [f"time.sleep({_literal(bound['seconds'])})"]
    if name in ("write", "typewrite") and isinstance(bound["message"], str):
        return _write(bound["message"], bound.get("interval"))
    given = {key: value for key, value in bound.items() if value is not None}
    if name == "hotkey":
        keys = ", ".join(_literal(key) for key in given.pop("keys"))
        return [f"pyautogui.hotkey({keys}{_keywords(given, first=False)})"]
    return [f"pyautogui.{name}({_keywords(given, first=True)})"]


def _write(text: str, interval: float | None) -> list[str]:
    """PyAutoGUI under X types `>` for `<`; the comma key with Shift gives the right character."""
    after = "" if interval is None else f", interval={_literal(interval)}"
    lines: list[str] = []
    for index, piece in enumerate(text.split("<")):
        if index:
            lines.append("pyautogui.hotkey('shift', ',')")
        if piece:
            lines.append(f"pyautogui.write({_literal(piece)}{after})")
    return lines


def _keywords(values: Mapping[str, Any], *, first: bool) -> str:
    text = ", ".join(f"{key}={_literal(value)}" for key, value in values.items())
    return text if first or not text else f", {text}"


def _literal(value: Any) -> str:
    """The value as a Python literal. ActionParseError for other types, because their repr may be any expression."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if type(value) in (int, float, str, bool):
        return repr(value)
    raise ActionParseError(f"{value!r} is not a literal")
