"""Mouse and keyboard through the XTest extension, in process: a click costs a millisecond, and every character is typed
exactly, because a character without a key gets a spare keycode."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import threading
import time
from collections.abc import Iterable, Sequence

from Xlib import X
from Xlib.display import Display
from Xlib.ext import xtest

from .keys import RETURN, SHIFT_L, keysym_of_char, keysym_of_key
from .processes import is_any_at_work

BUTTONS = {"left": 1, "middle": 2, "right": 3, "primary": 1, "secondary": 3, 1: 1, 2: 2, 3: 3}
KEYMAP_SETTLE_S = 0.05
"""Programs get an event for a new keymap and fetch it themselves; a key pressed before that would be misread."""
READ_TIME_S = 0.02
"""Time of a slow program to read one key: a terminal that looks for a font with a rare character."""
READ_LIMIT_S = 5.0
"""On a busy machine a program takes longer: wait until no program of the desktop computes, at most this long."""
READ_LOOK_S = 0.02
READ_LOOKS = 3
"""This many consecutive looks must find no busy program."""
LINE_SETTLE_S = 0.03
"""A shell must have started the command of one line before the next line is typed: until then the terminal is in
another mode, in which an Enter would arrive as a carriage return."""
DRAG_EVENTS = 12
"""Most toolkits do not recognise a drag that consists of one jump."""


class Input:
    """The one keyboard and mouse of a display. Methods are safe to call from several threads."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._lock = threading.RLock()
        self._held: set[int] = set()
        self._load_keymap()

    def _load_keymap(self) -> None:
        """Reads the current keymap: another program may have assigned spare keycodes, too."""
        first = self._display.display.info.min_keycode
        last = self._display.display.info.max_keycode
        rows = self._display.get_keyboard_mapping(first, last - first + 1)
        if not hasattr(self, "_lendable"):
            self._lendable = {first + offset for offset, row in enumerate(rows) if not any(row)}
        self._keys: dict[int, tuple[int, bool]] = {}
        """keysym -> (keycode, whether Shift is needed)"""
        self._lent: dict[int, int] = {}
        """keycode -> the keysym assigned to it"""
        for level in (0, 1):
            for offset, row in enumerate(rows):
                if level < len(row) and row[level] and row[level] not in self._keys:
                    self._keys[row[level]] = (first + offset, level == 1)
                    if first + offset in self._lendable:
                        self._lent[first + offset] = row[level]
        self._spare = sorted(self._lendable - set(self._lent))

    # Mouse

    def position(self) -> tuple[int, int]:
        with self._lock:
            pointer = self._display.screen().root.query_pointer()
            return pointer.root_x, pointer.root_y

    def size(self) -> tuple[int, int]:
        screen = self._display.screen()
        return screen.width_in_pixels, screen.height_in_pixels

    def move(self, x: float | None, y: float | None, *, duration_s: float = 0.0) -> None:
        with self._lock:
            from_x, from_y = self.position()
            to_x = from_x if x is None else round(x)
            to_y = from_y if y is None else round(y)
            steps = max(1, min(200, int(duration_s / 0.01)))
            for step in range(1, steps + 1):
                self._motion(from_x + (to_x - from_x) * step // steps, from_y + (to_y - from_y) * step // steps)
                if steps > 1:
                    self._display.sync()
                    time.sleep(duration_s / steps)
            self._display.sync()

    def button(self, name: str | int, *, down: bool) -> None:
        with self._lock:
            xtest.fake_input(self._display, X.ButtonPress if down else X.ButtonRelease, BUTTONS[name])
            self._display.sync()

    def click(self, name: str | int, *, clicks: int = 1, interval_s: float = 0.0) -> None:
        with self._lock:
            for index in range(clicks):
                if index and interval_s:
                    time.sleep(interval_s)
                self.button(name, down=True)
                self.button(name, down=False)

    def drag(self, x: float, y: float, name: str | int, *, duration_s: float = 0.0) -> None:
        with self._lock:
            self.button(name, down=True)
            self.move(x, y, duration_s=max(duration_s, DRAG_EVENTS * 0.01))
            self.button(name, down=False)

    def wheel(self, clicks: int, *, horizontal: bool = False) -> None:
        """Positive is up, or right."""
        button = (7 if clicks > 0 else 6) if horizontal else (4 if clicks > 0 else 5)
        with self._lock:
            for _ in range(abs(clicks)):
                xtest.fake_input(self._display, X.ButtonPress, button)
                xtest.fake_input(self._display, X.ButtonRelease, button)
            self._display.sync()

    def _motion(self, x: int, y: int) -> None:
        xtest.fake_input(self._display, X.MotionNotify, x=x, y=y)

    # Keyboard

    def key(self, name: str, *, down: bool) -> None:
        with self._lock:
            keysym = keysym_of_key(name)
            self._lend_keys([keysym])
            keycode, needs_shift = self._keys[keysym]
            if needs_shift:
                self._set_shift(down=down)
            self._send_key(keycode, down=down)
            self._display.sync()

    def press(self, names: Sequence[str], *, presses: int = 1, interval_s: float = 0.0) -> None:
        with self._lock:
            for index in range(presses):
                if index and interval_s:
                    time.sleep(interval_s)
                for name in names:
                    self._tap(keysym_of_key(name))
            self._display.sync()

    def hotkey(self, names: Sequence[str], *, interval_s: float = 0.0) -> None:
        """Presses all in order and releases them in reverse. Ctrl with `A` is Ctrl with the key of `a`, because
        "Ctrl+A" usually means that."""
        chord = [name.lower() if len(name) == 1 and len(names) > 1 else name for name in names]
        with self._lock:
            for down, order in ((True, chord), (False, chord[::-1])):
                for name in order:
                    self.key(name, down=down)
                    if interval_s:
                        time.sleep(interval_s)

    def write(self, text: str, *, interval_s: float = 0.0) -> None:
        with self._lock:
            keysyms = [keysym_of_char(char) for char in text]
            if any(keysym > 0xFFFF or keysym not in self._keys for keysym in keysyms):
                self._load_keymap()
            for start, end in self._chunks(keysyms):
                self._lend_keys(keysyms[start:end])
                for index, keysym in enumerate(keysyms[start:end], start):
                    self._tap(keysym)
                    if keysym == RETURN and index + 1 < len(keysyms):
                        self._display.sync()
                        time.sleep(max(interval_s, LINE_SETTLE_S))
                    elif interval_s:
                        self._display.sync()
                        time.sleep(interval_s)
            self._display.sync()

    def _tap(self, keysym: int) -> None:
        self._lend_keys([keysym])
        keycode, needs_shift = self._keys[keysym]
        shift_is_held = self._keys[SHIFT_L][0] in self._held
        if needs_shift and not shift_is_held:
            self._set_shift(down=True)
        self._send_key(keycode, down=True)
        self._send_key(keycode, down=False)
        if needs_shift and not shift_is_held:
            self._set_shift(down=False)

    def _set_shift(self, *, down: bool) -> None:
        self._send_key(self._keys[SHIFT_L][0], down=down)

    def _send_key(self, keycode: int, *, down: bool) -> None:
        xtest.fake_input(self._display, X.KeyPress if down else X.KeyRelease, keycode)
        if down:
            self._held.add(keycode)
        else:
            self._held.discard(keycode)

    def _chunks(self, keysyms: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Splits a text so that no piece needs more assigned keycodes than there are spare ones."""
        room = len(self._spare) + len(self._lent)
        start, wanted = 0, set[int]()
        for index, keysym in enumerate(keysyms):
            if keysym not in self._keys or self._keys[keysym][0] in self._lent:
                if len(wanted | {keysym}) > room:
                    yield start, index
                    start, wanted = index, set()
                wanted.add(keysym)
        yield start, len(keysyms)

    def _lend_keys(self, keysyms: Sequence[int]) -> None:
        missing = [keysym for keysym in dict.fromkeys(keysyms) if keysym not in self._keys]
        if not missing:
            return
        if len(missing) > len(self._spare):
            self._display.sync()
            # Text typed with the reassigned keycodes must have been read by then; X does not report it.
            time.sleep(KEYMAP_SETTLE_S + len(self._lent) * READ_TIME_S)
            _wait_until_read()
            for keycode in [code for code, keysym in self._lent.items() if keysym not in keysyms]:
                del self._keys[self._lent.pop(keycode)]
                self._spare.append(keycode)
        for keysym in missing:
            keycode = self._spare.pop(0)
            self._display.change_keyboard_mapping(keycode, [(keysym, keysym)])
            self._keys[keysym] = (keycode, False)
            self._lent[keycode] = keysym
        self._display.sync()
        time.sleep(KEYMAP_SETTLE_S)


def _wait_until_read() -> None:
    deadline = time.monotonic() + READ_LIMIT_S
    num_quiet = 0
    while num_quiet < READ_LOOKS and time.monotonic() < deadline:
        num_quiet = 0 if is_any_at_work(with_x_server=True) else num_quiet + 1
        time.sleep(READ_LOOK_S)
