"""Encodes a screenshot again if its client wants another format or size than the desktop returned."""

import asyncio
import io
from dataclasses import replace

from PIL import Image

from env_server.driving.driver import View
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.wire import ImageFormat

DEFAULT_QUALITY = 85


async def to_format(image: bytes, image_format: ImageFormat, quality: int | None = None) -> bytes:
    """Off the event loop. ReplicaError: the desktop returned no valid image."""
    return await asyncio.to_thread(_encode, image, image_format, quality, None)


async def in_size(seen: Observation, view: View, *, screen: tuple[int, int] | None) -> Observation:
    """The observation with a screenshot of the view's size. Our guests scale it themselves; foreign guests cannot.
    `screen` is the desktop's (width, height); None means the screenshot's own size, which is the whole screen then."""
    if view.image_size is None:
        return seen
    size = size_of(seen.screenshot)
    if size == view.image_size:
        return replace(seen, screen_size=screen or size)
    resized = await asyncio.to_thread(_encode, seen.screenshot, view.image_format, view.image_quality, view.image_size)
    return replace(seen, screenshot=resized, image_format=view.image_format, screen_size=size)


def size_of(image: bytes) -> tuple[int, int]:
    """(width, height), read only from the header. ReplicaError: it is not an image."""
    try:
        with open_picture(image) as picture:
            return picture.size
    except NO_PICTURE as error:
        raise ReplicaError("the desktop's screenshot is not an image; replace the replica") from error


def _encode(image: bytes, image_format: ImageFormat, quality: int | None, size: tuple[int, int] | None) -> bytes:
    encoded = io.BytesIO()
    try:
        with open_picture(image) as picture:
            pixels = picture.convert("RGB")
    except NO_PICTURE as error:
        raise ReplicaError("the desktop's screenshot is not an image; replace the replica") from error
    if size is not None:
        pixels = pixels.resize(size, Image.Resampling.BICUBIC)
    if image_format == "png":
        pixels.save(encoded, "PNG", compress_level=1)
    else:
        pixels.save(encoded, image_format.upper(), quality=quality or DEFAULT_QUALITY)
    return encoded.getvalue()
