"""Small pictures of the screen for people who watch, as a stream: cheaper than screenshots, and none while nothing
changes."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import io
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol

from PIL import Image

QUALITY = 75
MIN_WIDTH, MAX_WIDTH = 64, 1920
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 10.0
STREAM_S = 120.0
HEARTBEAT_S = 5.0
"""After this time without a frame an empty one is sent, so that both sides notice when the other is gone."""
MAX_STREAMS = 4


class Framebuffer(Protocol):
    width: int
    height: int
    stride: int

    def new_pixels(self, seen: bytes) -> bytes | None: ...


class Frames:
    def __init__(
        self,
        screen: Framebuffer,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._screen, self._clock, self._sleep = screen, clock, sleep
        self._lock, self._num_streams = threading.Lock(), 0

    def stream(self, width: int, interval_s: float) -> Generator[bytes, None, None]:
        """Records: 4 bytes with the length of a JPEG, then the JPEG, at most `width` pixels wide. The screen is read
        every `interval_s`; there is a record if a pixel has changed, and an empty one after HEARTBEAT_S without a
        change. Ends after STREAM_S.

        Raises:
            ValueError: a number is out of range, or there are too many streams.
        """
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"width must be {MIN_WIDTH} to {MAX_WIDTH}, not {width}")
        if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
            raise ValueError(f"interval_s must be {MIN_INTERVAL_S} to {MAX_INTERVAL_S}, not {interval_s}")
        if self._num_streams >= MAX_STREAMS:
            raise ValueError(f"{MAX_STREAMS} streams of frames are open already")
        return self._records(width, interval_s)

    def _records(self, width: int, interval_s: float) -> Generator[bytes, None, None]:
        # Counted here: a stream that is closed before its first record never counts.
        self._count(1)
        try:
            seen, started = b"", self._clock()
            sent_at = started
            while self._clock() - started < STREAM_S:
                pixels = self._screen.new_pixels(seen)
                if pixels is not None:
                    seen, sent_at = pixels, self._clock()
                    picture = self._encode(pixels, width)
                    yield len(picture).to_bytes(4, "big") + picture
                elif self._clock() - sent_at >= HEARTBEAT_S:
                    sent_at = self._clock()
                    yield bytes(4)
                self._sleep(interval_s)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_streams += change

    def _encode(self, pixels: bytes, width: int) -> bytes:
        screen = self._screen
        factor = max(1, -(-screen.width // width))
        # The framebuffer's four channels as they are, so that nothing is copied before the picture is small. A much
        # smaller picture is made from every fourth line.
        skipped = 4 if factor >= 4 else 1
        size = (screen.width, screen.height // skipped)
        image = Image.frombuffer("RGBX", size, pixels, "raw", "RGBX", screen.stride * skipped, 1)
        blue, green, red, _ = image.reduce((factor, max(1, factor // skipped))).split()
        buffer = io.BytesIO()
        Image.merge("RGB", (red, green, blue)).save(buffer, "JPEG", quality=QUALITY, subsampling=2)
        return buffer.getvalue()
