"""The screen as an encoded picture, read from the memory that Xvfb draws into: about a millisecond a grab, and the
mouse cursor is in it."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import io
import mmap
import struct
from pathlib import Path

from PIL import Image
from Xlib.display import Display

_HEADER = struct.Struct(">25I")
"""An XWD file starts with 25 big-endian words: 0 header size, 4 width, 5 height, 12 bytes a line, 19 colours."""
_COLOUR_BYTES = 12
JPEG_QUALITY = 90
WEBP_QUALITY = 80


class Screen:
    """The framebuffer of one Xvfb, started with `-fbdir`."""

    def __init__(self, framebuffer: Path, display: Display) -> None:
        self._display = display
        with framebuffer.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _HEADER.unpack_from(self._memory)
        self.width, self.height, self._stride = header[4], header[5], header[12]
        self._start = header[0] + header[19] * _COLOUR_BYTES
        self._bytes = self._stride * self.height

    def grab(self) -> Image.Image:
        """The screen as it is once the X server has handled what it was sent so far."""
        self._display.sync()
        data = self._memory[self._start : self._start + self._bytes]
        return Image.frombuffer("RGB", (self.width, self.height), data, "raw", "BGRX", self._stride, 1)

    def encode(self, image_format: str) -> bytes:
        """`png`, `jpeg` or `webp`."""
        buffer = io.BytesIO()
        image = self.grab()
        if image_format == "png":
            image.save(buffer, "PNG", compress_level=1)
        elif image_format == "jpeg":
            image.save(buffer, "JPEG", quality=JPEG_QUALITY)
        elif image_format == "webp":
            image.save(buffer, "WEBP", quality=WEBP_QUALITY, method=0)
        else:
            raise ValueError(f"format must be png, jpeg or webp, not {image_format!r}")
        return buffer.getvalue()
