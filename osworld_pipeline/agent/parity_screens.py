"""Synthetic screens of the parity probe: the same pixels on every machine, drawn without a desktop or a system font.

Positions of windows, small text, buttons and fine lines follow from a seed, so that no two regions look the same and a
resampled, mirrored or exchanged screen differs for the model.
"""

import io
import random

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
LABELS = ("File", "Edit", "Save as", "Cancel", "Search", "Rename", "alpha", "bravo", "3 of 12", "OK")
TEXT_HEIGHT = 11
"""Height of the built-in bitmap font."""
NUM_WINDOWS = 4
TARGET: Colour = (220, 40, 40)


def draw_screen(width: int, height: int, *, seed: int) -> bytes:
    """A PNG of exactly this size."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), _colour(rng, dark=True))
    draw = ImageDraw.Draw(image)
    _draw_ruler(draw, width, height)
    for _ in range(NUM_WINDOWS):
        _draw_window(draw, rng, width, height)
    _draw_target(draw, rng, width, height)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _draw_ruler(draw: ImageDraw.ImageDraw, width: int, height: int) -> None:
    """Lines one pixel wide, with growing distances to the right and downwards: no two image tokens see the same
    ones."""
    place, step = 0, 3
    while place < max(width, height):
        draw.line([(place, 0), (place, height)], fill=(70, 110, 90))
        draw.line([(0, place), (width, place)], fill=(110, 70, 120))
        place += step
        step += 1


def _draw_window(draw: ImageDraw.ImageDraw, rng: random.Random, width: int, height: int) -> None:
    left, top = _between(rng, 0, width * 2 // 3), _between(rng, 0, height * 2 // 3)
    right, bottom = left + _between(rng, width // 5, width // 2), top + _between(rng, height // 5, height // 2)
    draw.rectangle([left, top, right, bottom], fill=_colour(rng, dark=False), outline=(20, 20, 20))
    draw.rectangle([left, top, right, top + TEXT_HEIGHT], fill=_colour(rng, dark=True))
    font = ImageFont.load_default_imagefont()
    for line, place in enumerate(range(top, bottom - TEXT_HEIGHT, TEXT_HEIGHT + 3)):
        text = " ".join(LABELS[_between(rng, 0, len(LABELS))] for _ in range(1 + (right - left) // 60))
        draw.text((left + 3, place + 1), text, fill=(240, 240, 240) if line == 0 else (15, 15, 15), font=font)


def _draw_target(draw: ImageDraw.ImageDraw, rng: random.Random, width: int, height: int) -> None:
    side = max(6, min(width, height) // 8)
    left, top = _between(rng, 0, width - side), _between(rng, 0, height - side)
    draw.rectangle([left, top, left + side, top + side], fill=TARGET, outline=(255, 255, 255))


def _colour(rng: random.Random, *, dark: bool) -> Colour:
    low, high = (20, 110) if dark else (140, 250)
    return _between(rng, low, high), _between(rng, low, high), _between(rng, low, high)


def _between(rng: random.Random, low: int, high: int) -> int:
    """A number from `low` to below `high`. Only `random()` gives the same numbers in every version of Python."""
    return low + int(rng.random() * max(1, high - low))
