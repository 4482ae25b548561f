"""Keys and mouse through QEMU's emulated devices, for a guest without an agent that answers: calls with pyautogui names
are first converted to a list of input events (pure), which are then sent."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from env_server.foreign_input import Call
from env_server.guest.calls import bind_call, perform_call
from env_server.providers.qemu.qmp import QmpClient
from osworld_pipeline.errors import ActionParseError

HOLD_S = 0.02
"""Time between a press and its release, so that a guest that polls its keyboard sees both."""
AXIS_MAX = 0x7FFF
DRAG_EVENTS = 12

_SHIFTED = dict(zip('~!@#$%^&*()_+{}|:"<>?', "`1234567890-=[]\\;',./", strict=True))
_PUNCTUATION = {
    "`": "grave_accent", "-": "minus", "=": "equal", "[": "bracket_left", "]": "bracket_right", "\\": "backslash",
    ";": "semicolon", "'": "apostrophe", ",": "comma", ".": "dot", "/": "slash", " ": "spc", "\n": "ret", "\r": "ret",
    "\t": "tab", "\b": "backspace", "\x1b": "esc", "\x7f": "delete",
}  # fmt: skip
_NAMED = {
    "enter": "ret", "return": "ret", "esc": "esc", "escape": "esc", "backspace": "backspace", "tab": "tab",
    "space": "spc", "delete": "delete", "del": "delete", "insert": "insert", "home": "home", "end": "end",
    "pageup": "pgup", "pgup": "pgup", "pagedown": "pgdn", "pgdn": "pgdn", "up": "up", "down": "down", "left": "left",
    "right": "right", "shift": "shift", "shiftleft": "shift", "shiftright": "shift_r", "ctrl": "ctrl",
    "control": "ctrl", "ctrlleft": "ctrl", "ctrlright": "ctrl_r", "alt": "alt", "altleft": "alt", "altright": "alt_r",
    "option": "alt", "optionleft": "alt", "optionright": "alt_r", "win": "meta_l", "winleft": "meta_l",
    "super": "meta_l", "meta": "meta_l", "command": "meta_l", "cmd": "meta_l", "winright": "meta_r", "apps": "menu",
    "menu": "menu", "capslock": "caps_lock", "numlock": "num_lock", "scrolllock": "scroll_lock", "pause": "pause",
    "print": "print", "printscreen": "print", "prntscrn": "print", "prtsc": "print", "prtscr": "print",
    "add": "kp_add", "subtract": "kp_subtract", "multiply": "kp_multiply", "divide": "kp_divide",
    "decimal": "kp_decimal", "volumemute": "audiomute", "volumeup": "volumeup", "volumedown": "volumedown",
    "help": "help", "sleep": "sleep",
}  # fmt: skip
_NAMED |= {f"f{n}": f"f{n}" for n in range(1, 13)}
_NAMED |= {f"num{n}": f"kp_{n}" for n in range(10)}
_BUTTONS = {
    "left": "left", "middle": "middle", "right": "right", "primary": "left", "secondary": "right",
    1: "left", 2: "middle", 3: "right",
}  # fmt: skip

Event = Mapping[str, Any]
"""One event of QMP's input-send-event."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Events that happen together, and the pause after them."""

    events: tuple[Event, ...]
    pause_s: float = 0.0


def qcodes_of(key: str) -> tuple[str, ...]:
    """The keys of a US keyboard for a pyautogui key name or a character, Shift first if it is needed. ActionParseError
    for keys that such a keyboard does not have."""
    if len(key) == 1:
        if key in _PUNCTUATION:
            return (_PUNCTUATION[key],)
        if key in _SHIFTED:
            return ("shift", *qcodes_of(_SHIFTED[key]))
        if key.isascii() and key.isalnum():
            return ("shift", key.lower()) if key.isupper() else (key,)
    elif key.lower() in _NAMED:
        return (_NAMED[key.lower()],)
    raise ActionParseError(f"an emulated US keyboard has no key for {key!r}; let the guest agent type it")


def plan_input(calls: Sequence[Call], *, screen_size: tuple[int, int], start: tuple[int, int]) -> tuple[Moment, ...]:
    """The events of some calls, in order; `start` is where the mouse is.

    Raises:
        ActionParseError: an unknown call, or a character without a key; nothing was sent.
    """
    device = _Recorder(screen_size=screen_size, x=start[0], y=start[1])
    for call in calls:
        try:
            name, bound = bind_call({"name": call.name, "args": call.args, "kwargs": call.kwargs})
        except (ValueError, TypeError) as error:
            raise ActionParseError(str(error)) from error
        if name == "sleep":
            device.moments.append(Moment(events=(), pause_s=float(bound["seconds"])))
        else:
            perform_call(device, name, bound)
    return tuple(device.moments)


@dataclass(kw_only=True)
class _Recorder:
    """Has the methods of the guest's own input device, and records their events."""

    screen_size: tuple[int, int]
    x: int
    y: int
    moments: list[Moment] = field(default_factory=list)

    def position(self) -> tuple[int, int]:
        return self.x, self.y

    def move(self, x: float | None, y: float | None, *, duration_s: float = 0.0) -> None:
        to_x, to_y = self.x if x is None else round(x), self.y if y is None else round(y)
        from_x, from_y = self.x, self.y
        steps = max(1, min(100, int(duration_s / 0.02)))
        for step in range(1, steps + 1):
            self.x = from_x + (to_x - from_x) * step // steps
            self.y = from_y + (to_y - from_y) * step // steps
            pairs = zip(("x", "y"), (self.x, self.y), self.screen_size, strict=True)
            events = tuple(_absolute(axis, value, size) for axis, value, size in pairs)
            self.moments.append(Moment(events=events, pause_s=duration_s / steps))

    def button(self, name: str | int, *, down: bool) -> None:
        self._add({"type": "btn", "data": {"button": _BUTTONS[name], "down": down}})

    def click(self, name: str | int, *, clicks: int = 1, interval_s: float = 0.0) -> None:
        for index in range(clicks):
            if index and interval_s:
                self.moments.append(Moment(events=(), pause_s=interval_s))
            self.button(name, down=True)
            self.button(name, down=False)

    def drag(self, x: float, y: float, name: str | int, *, duration_s: float = 0.0) -> None:
        self.button(name, down=True)
        self.move(x, y, duration_s=max(duration_s, DRAG_EVENTS * HOLD_S))
        self.button(name, down=False)

    def wheel(self, clicks: int, *, horizontal: bool = False) -> None:
        if horizontal:
            raise ActionParseError("the emulated mouse has no horizontal wheel; let the guest agent scroll")
        for _ in range(abs(clicks)):
            for down in (True, False):
                self._add({"type": "btn", "data": {"button": "wheel-up" if clicks > 0 else "wheel-down", "down": down}})

    def key(self, name: str, *, down: bool) -> None:
        codes = qcodes_of(name)
        for code in codes if down else codes[::-1]:
            self._key(code, down=down)

    def press(self, names: Sequence[str], *, presses: int = 1, interval_s: float = 0.0) -> None:
        for index in range(presses):
            if index and interval_s:
                self.moments.append(Moment(events=(), pause_s=interval_s))
            for name in names:
                self.key(name, down=True)
                self.key(name, down=False)

    def hotkey(self, names: Sequence[str], *, interval_s: float = 0.0) -> None:
        chord = [name.lower() if len(name) == 1 and len(names) > 1 else name for name in names]
        for down, order in ((True, chord), (False, chord[::-1])):
            for name in order:
                self.key(name, down=down)
                if interval_s:
                    self.moments.append(Moment(events=(), pause_s=interval_s))

    def write(self, text: str, *, interval_s: float = 0.0) -> None:
        for char in text:
            self.press([char])
            if interval_s:
                self.moments.append(Moment(events=(), pause_s=interval_s))

    def _key(self, code: str, *, down: bool) -> None:
        self._add({"type": "key", "data": {"key": {"type": "qcode", "data": code}, "down": down}})

    def _add(self, event: Event) -> None:
        self.moments.append(Moment(events=(event,), pause_s=HOLD_S))


def _absolute(axis: str, value: int, size: int) -> Event:
    inside = min(max(value, 0), size - 1)
    return {"type": "abs", "data": {"axis": axis, "value": inside * AXIS_MAX // max(1, size - 1)}}


class QmpInput:
    """The keyboard and the absolute pointer of one machine; it records the mouse position."""

    def __init__(self, qmp: QmpClient, *, screen_size: tuple[int, int]) -> None:
        self._qmp, self._screen_size = qmp, screen_size
        self._position = (screen_size[0] // 2, screen_size[1] // 2)

    async def perform(self, calls: Sequence[Call], *, limit_s: float | None = None) -> None:
        """Each key is a separate command, so that a long text is sent in parts that fit every guest's buffer.

        Raises:
            ActionParseError: refused completely, also if it would take longer than `limit_s`; nothing was sent.
            ReplicaError: QEMU is gone.
        """
        moments = plan_input(calls, screen_size=self._screen_size, start=self._position)
        takes_s = sum(moment.pause_s for moment in moments)
        if limit_s is not None and takes_s > limit_s:
            raise ActionParseError(
                f"the input would take {takes_s:.0f} s on emulated keys, the limit is {limit_s:g} s; type it in parts"
            )
        for moment in moments:
            if moment.events:
                await self._qmp.execute("input-send-event", {"events": list(moment.events)})
            self._position = next(_positions(moment, self._screen_size), self._position)
            if moment.pause_s:
                await asyncio.sleep(moment.pause_s)


def _positions(moment: Moment, screen_size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    values = [event["data"]["value"] for event in moment.events if event["type"] == "abs"]
    if len(values) == 2:
        width, height = screen_size
        yield round(values[0] * (width - 1) / AXIS_MAX), round(values[1] * (height - 1) / AXIS_MAX)
