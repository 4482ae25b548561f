"""The screen of an X server whose framebuffer is not shared memory: read through X requests, with the mouse cursor
drawn in."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import struct
import threading

from PIL import Image, ImageChops
from Xlib import X
from Xlib.display import Display

from .screen import Screen


class RootWindowScreen(Screen):
    """Slower than reading the framebuffer, but works with every X server."""

    def __init__(self, display: Display) -> None:
        self._display, self._lock = display, threading.Lock()
        size = display.screen().root.get_geometry()
        self.width, self.height, self.stride = size.width, size.height, 4 * size.width
        self._has_cursor = display.query_extension("XFIXES") is not None
        if self._has_cursor:
            display.xfixes_query_version()

    def pixels(self) -> bytes:
        with self._lock:
            return self._pixels()

    def new_pixels(self, seen: bytes) -> bytes | None:
        pixels = self.pixels()
        return None if pixels == seen else pixels

    def grab(self) -> Image.Image:
        with self._lock:
            data = self._pixels()
            root = self._display.screen().root
            cursor = self._display.xfixes_get_cursor_image(root) if self._has_cursor else None
        image = Image.frombuffer("RGB", (self.width, self.height), data, "raw", "BGRX", 0, 1)
        if cursor is not None:
            _put_cursor(image, cursor)
        return image

    def _pixels(self) -> bytes:
        root = self._display.screen().root
        return root.get_image(0, 0, self.width, self.height, X.ZPixmap, 0xFFFFFFFF).data


def _put_cursor(image: Image.Image, cursor: object) -> None:
    width, height = getattr(cursor, "width", 0), getattr(cursor, "height", 0)
    if not width or not height:
        return
    pixels = list(getattr(cursor, "cursor_image", ()))[: width * height]
    drawn = Image.frombytes("RGBA", (width, height), struct.pack(f"<{len(pixels)}I", *pixels), "raw", "BGRA")
    left, top = (
        getattr(cursor, "x", 0) - getattr(cursor, "xhot", 0),
        getattr(cursor, "y", 0) - getattr(cursor, "yhot", 0),
    )
    below = image.crop((left, top, left + width, top + height))
    # The cursor's colours are premultiplied by alpha, so they are added to the darkened background.
    shade = ImageChops.invert(drawn.getchannel("A"))
    through = ImageChops.multiply(below, Image.merge("RGB", (shade, shade, shade)))
    red, green, blue, _ = drawn.split()
    image.paste(ImageChops.add(through, Image.merge("RGB", (red, green, blue))), (left, top))
