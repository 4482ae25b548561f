"""Facts about a screen without the guest: whether it is blank, whether it is stable, and where it contains a given
image. Pure; screens are PPM files as QEMU dumps them, exact to the pixel."""

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

from osworld_pipeline.domain.pictures import NO_PICTURE
from osworld_pipeline.errors import DependencyError, ReplicaError

STILL_SHARE = 0.002
"""A blinking caret and a clock change fewer pixels than this share of a screen; a window changes more."""
DRAWN_SHARE = 0.0005
"""A screen that is off, or shows only a caret, has fewer pixels than this share outside its most common colour."""


@dataclass(frozen=True, eq=False)
class Mark:
    """A part of a screen to be found, cut from a screenshot of the same machine."""

    name: str
    image: Image.Image

    @classmethod
    def load(cls, path: Path) -> "Mark":
        """DependencyError if it is not an image."""
        try:
            return cls(path.stem, Image.open(path).convert("RGB"))
        except OSError as error:
            raise DependencyError(f"the mark {path} is not an image ({error}); cut one from a screenshot") from error


def open_screen(dump: bytes) -> Image.Image:
    """ReplicaError if it is not a complete image."""
    try:
        return Image.open(io.BytesIO(dump), formats=["PPM"]).convert("RGB")
    except NO_PICTURE as error:
        raise ReplicaError(f"QEMU dumped a screen that cannot be read ({error}); replace the replica") from error


def is_blank(screen: Image.Image) -> bool:
    background = max(screen.convert("L").histogram())
    return 1.0 - background / (screen.width * screen.height) < DRAWN_SHARE


def changed_share(before: Image.Image, after: Image.Image) -> float:
    """The share of pixels that differ; 1 if the sizes differ."""
    if before.size != after.size:
        return 1.0
    difference = ImageChops.difference(before, after).convert("L")
    unchanged = difference.histogram()[0]
    return 1.0 - unchanged / (after.width * after.height)


def find_mark(screen: Image.Image, mark: Image.Image) -> tuple[int, int] | None:
    """The upper left corner of the first place where the screen has exactly these pixels; None if there is none."""
    pixels, rows = screen.tobytes(), mark.tobytes()
    width, height = mark.width * 3, screen.width * 3
    if mark.width > screen.width or mark.height > screen.height:
        return None
    first = rows[:width]
    at = pixels.find(first)
    while at >= 0:
        top, left = divmod(at, height)
        fits = left % 3 == 0 and left + width <= height and top + mark.height <= screen.height
        if fits and all(
            pixels[at + row * height : at + row * height + width] == rows[row * width : (row + 1) * width]
            for row in range(1, mark.height)
        ):
            return left // 3, top
        at = pixels.find(first, at + 1)
    return None
