"""Screenshots of QEMU's emulated display, without the guest: milliseconds even if the guest is emulated."""

import asyncio
import io
import os
import re
from collections.abc import AsyncGenerator, Callable

from PIL import Image

from env_server.providers.qemu.qmp import QmpClient
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.wire import ImageFormat

JPEG_QUALITY = 90
WEBP_QUALITY = 80
FRAME_QUALITY = 75
FULL_COLOUR_QUALITY = 95
"""A JPEG of this quality or more has full chroma resolution."""
PNG_LEVEL = 1
_FDSET = 3
_HEADER = re.compile(rb"P6\s+(\d+)\s+(\d+)\s+255\s")
_DUMP_LIMIT_S = 20.0


class Display:
    """Dumps are written to an unnamed file in memory, which is reused."""

    def __init__(self, qmp: QmpClient, *, name: str) -> None:
        self._qmp, self._name = qmp, name
        self._turn = asyncio.Lock()
        self._memory = os.memfd_create("screen")
        # QEMU accepts a descriptor only if its access mode is exactly the requested one.
        self._written = os.open(f"/proc/self/fd/{self._memory}", os.O_WRONLY | os.O_CLOEXEC)
        self._is_known = False
        self._is_closed = False

    async def dump(self) -> bytes:
        """The screen as a PPM file (RGB)."""
        async with self._turn:
            if self._is_closed:
                raise ReplicaError(f"the display of {self._name} is closed; replace the replica")
            if not self._is_known:
                await self._qmp.execute("add-fd", {"fdset-id": _FDSET}, fds=[self._written])
                self._is_known = True
            os.ftruncate(self._memory, 0)
            os.lseek(self._written, 0, os.SEEK_SET)
            await self._qmp.execute("screendump", {"filename": f"/dev/fdset/{_FDSET}"}, timeout_s=_DUMP_LIMIT_S)
            if self._is_closed:  # meanwhile
                raise ReplicaError(f"the display of {self._name} is closed; replace the replica")
            return os.pread(self._memory, os.fstat(self._memory).st_size, 0)

    async def size(self) -> tuple[int, int]:
        """(width, height). ReplicaError if the dump is not a PPM file."""
        found = _HEADER.match(await self.dump())
        if found is None:
            raise ReplicaError(f"QEMU of {self._name} dumped a screen that is not a PPM file; replace the replica")
        return int(found[1]), int(found[2])

    async def screenshot(
        self, image_format: ImageFormat, quality: int | None, size: tuple[int, int] | None = None
    ) -> bytes:
        data = await self.dump()
        return await asyncio.to_thread(encode_ppm, data, image_format, quality, size)

    async def frames(self, width: int, interval_s: float) -> AsyncGenerator[bytes, None]:
        """A JPEG of the screen and of each change of it, at most `width` pixels wide, until a ReplicaError: the machine
        has ended."""
        seen = b""
        while True:
            data = await self.dump()
            if data != seen:
                seen = data
                yield await asyncio.to_thread(_frame, data, width)
            await asyncio.sleep(interval_s)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._memory)
            os.close(self._written)


def encode_ppm(
    data: bytes, image_format: ImageFormat, quality: int | None = None, size: tuple[int, int] | None = None
) -> bytes:
    """Converts a PPM file to another format, and to another (width, height) if one is given. ReplicaError if it is
    invalid or truncated."""
    image = _image(data)
    if size is not None and size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    _ENCODERS[image_format](image, buffer, quality)
    return buffer.getvalue()


def _image(ppm: bytes) -> Image.Image:
    found = _HEADER.match(ppm)
    if found is None:
        raise ReplicaError("QEMU dumped a screen that is not a PPM file; replace the replica")
    width, height = int(found[1]), int(found[2])
    if len(ppm) - found.end() < width * height * 3:
        raise ReplicaError("QEMU dumped an incomplete screen; replace the replica")
    return Image.frombytes("RGB", (width, height), ppm[found.end() :])


def _frame(ppm: bytes, width: int) -> bytes:
    """A frame in the format of our own guests (env_server/guest/frames.py)."""
    image, buffer = _image(ppm), io.BytesIO()
    image.reduce(max(1, -(-image.width // width))).save(buffer, "JPEG", quality=FRAME_QUALITY, subsampling=2)
    return buffer.getvalue()


def _png(image: Image.Image, buffer: io.BytesIO, _: int | None) -> None:
    image.save(buffer, "PNG", compress_level=PNG_LEVEL)


def _jpeg(image: Image.Image, buffer: io.BytesIO, quality: int | None) -> None:
    quality = quality or JPEG_QUALITY
    image.save(buffer, "JPEG", quality=quality, subsampling=0 if quality >= FULL_COLOUR_QUALITY else 2)


def _webp(image: Image.Image, buffer: io.BytesIO, quality: int | None) -> None:
    image.save(buffer, "WEBP", quality=quality or WEBP_QUALITY, method=0)


_ENCODERS: dict[ImageFormat, Callable[[Image.Image, io.BytesIO, int | None], None]] = {
    "png": _png,
    "jpeg": _jpeg,
    "webp": _webp,
}
