"""Screenshots for a model: limited in pixels, with sides divisible by 32; bytes are unchanged if they fit."""

import io
import math
from dataclasses import dataclass

from PIL import Image

from osworld_pipeline.dialects.coordinates import CoordinateSpace, from_screen, to_screen
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture

SIDE_FACTOR = 32
"""Patch size 16 times merge size 2: one token covers 32x32 pixels."""


@dataclass(frozen=True, kw_only=True)
class ModelImage:
    data: bytes
    """Lossless WebP, or the original bytes if no resize was needed."""
    format: str
    width: int
    height: int
    screen_width: int
    screen_height: int
    sha256: str

    @property
    def num_tokens(self) -> int:
        return (self.width // SIDE_FACTOR) * (self.height // SIDE_FACTOR)

    def to_screen(self, x: float, y: float, space: CoordinateSpace = "model_pixels") -> tuple[int, int]:
        """Maps a point that a model wrote for this image to a pixel of the screen, clamped to it."""
        return to_screen(x, y, space=space, image=self._size, screen=(self.screen_width, self.screen_height))

    def from_screen(self, x: float, y: float, space: CoordinateSpace = "model_pixels") -> tuple[float, float]:
        """Maps a pixel of the screen to the model's coordinates for this image."""
        return from_screen(x, y, space=space, image=self._size, screen=(self.screen_width, self.screen_height))

    @property
    def _size(self) -> tuple[int, int]:
        return self.width, self.height


def fit_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size with sides rounded to multiples of 32; reduced, in nearly the same shape, if it would have more than
    `max_pixels` pixels."""
    if width % SIDE_FACTOR == 0 and height % SIDE_FACTOR == 0 and width * height <= max_pixels:
        return width, height
    fit_width, fit_height = _rounded(width), _rounded(height)
    if fit_width * fit_height > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        fit_width = max(SIDE_FACTOR, math.floor(width / shrink / SIDE_FACTOR) * SIDE_FACTOR)
        fit_height = max(SIDE_FACTOR, math.floor(height / shrink / SIDE_FACTOR) * SIDE_FACTOR)
    # A very long and thin screen: the short side cannot shrink below 32, so the long side must.
    if fit_width * fit_height > max_pixels:
        if fit_width >= fit_height:
            fit_width = max(SIDE_FACTOR, max_pixels // fit_height // SIDE_FACTOR * SIDE_FACTOR)
        else:
            fit_height = max(SIDE_FACTOR, max_pixels // fit_width // SIDE_FACTOR * SIDE_FACTOR)
    return fit_width, fit_height


def _rounded(side: int) -> int:
    return max(SIDE_FACTOR, round(side / SIDE_FACTOR) * SIDE_FACTOR)


def prepare_screenshot(data: bytes, max_pixels: int, *, screen_size: tuple[int, int] | None = None) -> ModelImage:
    """The screenshot resized for the model, or its exact bytes if it already fits, for example because the desktop
    resized it; `screen_size` is then the size of the screen.

    Raises:
        ValueError: the bytes are not an image.
    """
    try:
        with open_picture(data) as image:
            image_format = (image.format or "png").lower()
            screen_width, screen_height = screen_size or image.size
            width, height = fit_size(*image.size, max_pixels)
            if (width, height) == image.size:
                _check_whole(image)
            else:
                resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
                buffer = io.BytesIO()
                # Lossless WebP of the least effort takes 70% of the time and bytes of PNG at level 1.
                resized.save(buffer, format="WEBP", lossless=True, method=0, quality=0)
                data, image_format = buffer.getvalue(), "webp"
    except NO_PICTURE as error:
        raise ValueError(f"a screenshot of {len(data)} bytes is not an image: {error}") from error
    return ModelImage(
        data=data,
        format=image_format,
        width=width,
        height=height,
        screen_width=screen_width,
        screen_height=screen_height,
        sha256=digest_bytes(data),
    )


def _check_whole(image: Image.Image) -> None:
    """Raises OSError or SyntaxError, Pillow's exception for a broken PNG. Verifying its checksums detects as much as
    decoding, in a hundredth of the time."""
    if image.format == "PNG":
        image.verify()
    else:
        image.load()
