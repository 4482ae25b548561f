"""Windows by name or class, through the window manager's protocol (EWMH): /setup/activate_window, /setup/close_window
and the wallpaper."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import threading
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps
from Xlib import X, Xatom
from Xlib.display import Display
from Xlib.error import XError
from Xlib.protocol.event import ClientMessage

_BY_A_PAGER = 2
_WALLPAPER_LINES = 8
"""Lines of a picture per X request: a request may not be longer than 256 KiB."""


class Window(NamedTuple):
    """A top-level window as the window manager lists it."""

    window_id: int
    title: str
    classes: tuple[str, str]


class WindowManager:
    def __init__(self, display: Display) -> None:
        self._display = display
        self._root = display.screen().root
        self._lock = threading.RLock()

    def windows(self) -> list[Window]:
        """Bottom to top."""
        with self._lock:
            found = self._property(self._root, "_NET_CLIENT_LIST_STACKING", Xatom.WINDOW)
            return [window for window in map(self._describe, found or ()) if window is not None]

    def active_window_id(self) -> int | None:
        with self._lock:
            found = self._property(self._root, "_NET_ACTIVE_WINDOW", Xatom.WINDOW)
            return int(found[0]) if found is not None and len(found) and found[0] else None

    def find(self, name: str, *, strict: bool, by_class: bool) -> Window | None:
        """The topmost window whose title (or class) contains `name`; with `strict`, equals it. Like wmctrl, letter case
        matters only if strict."""
        for window in reversed(self.windows()):
            texts = (".".join(window.classes), *window.classes) if by_class else (window.title,)
            if any(text == name if strict else name.lower() in text.lower() for text in texts):
                return window
        return None

    def activate(self, window: Window) -> None:
        self._send_message(window.window_id, "_NET_ACTIVE_WINDOW", [_BY_A_PAGER, X.CurrentTime, 0])

    def close(self, window: Window) -> None:
        self._send_message(window.window_id, "_NET_CLOSE_WINDOW", [X.CurrentTime, _BY_A_PAGER])

    def size(self, window: Window) -> tuple[int, int] | None:
        """None if it has been closed meanwhile."""
        with self._lock:
            try:
                geometry = self._display.create_resource_object("window", window.window_id).get_geometry()
            except XError:
                return None
            return geometry.width, geometry.height

    def set_wallpaper(self, path: Path) -> None:
        """Draws the picture over the whole root window. OSError if it is not a picture."""
        screen = self._display.screen()
        size = (screen.width_in_pixels, screen.height_in_pixels)
        image = ImageOps.fit(Image.open(path).convert("RGB"), size)
        with self._lock:
            pixmap = self._root.create_pixmap(*size, screen.root_depth)
            context = pixmap.create_gc()
            for top in range(0, size[1], _WALLPAPER_LINES):
                band = image.crop((0, top, size[0], min(top + _WALLPAPER_LINES, size[1])))
                data = band.tobytes("raw", "BGRX")
                pixmap.put_image(context, 0, top, size[0], band.height, X.ZPixmap, screen.root_depth, 0, data)
            self._root.change_attributes(background_pixmap=pixmap)
            self._root.clear_area()
            context.free()
            pixmap.free()
            self._display.sync()

    def _describe(self, window_id: int) -> Window | None:
        window = self._display.create_resource_object("window", window_id)
        try:
            title = self._property(window, "_NET_WM_NAME", self._display.intern_atom("UTF8_STRING"))
            text = title.decode("utf-8", "replace") if isinstance(title, bytes) else (window.get_wm_name() or "")
            classes = window.get_wm_class() or ("", "")
        except XError:
            return None  # closed between the list and this request
        return Window(window_id, text if isinstance(text, str) else "", (str(classes[0]), str(classes[1])))

    def _property(self, window: Any, name: str, kind: int) -> Any:
        found = window.get_full_property(self._display.intern_atom(name), kind)
        return None if found is None else found.value

    def _send_message(self, window_id: int, message: str, data: list[int]) -> None:
        with self._lock:
            event = ClientMessage(
                window=window_id,
                client_type=self._display.intern_atom(message),
                data=(32, data + [0] * (5 - len(data))),
            )
            mask = X.SubstructureRedirectMask | X.SubstructureNotifyMask
            self._root.send_event(event, event_mask=mask)
            self._display.sync()
