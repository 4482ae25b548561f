"""Units of coordinates, and the conversion between an image in the model's input and the screen that it shows."""

from collections.abc import Callable
from typing import Literal, get_args

CoordinateSpace = Literal["model_pixels", "unit", "thousand"]
"""`model_pixels`: pixels of the model's image, after resizing; `unit`: 0..1 of its width and height; `thousand`:
0..1000 of them."""

COORDINATE_SPACES: tuple[CoordinateSpace, ...] = get_args(CoordinateSpace)
MAX_PIXEL = 100_000
UNIT_DIGITS = 4
"""Decimals of a coordinate from 0 to 1: a fifth of a pixel on a screen of width 1920."""

Size = tuple[int, int]
"""(width, height) in pixels."""
ScalePoint = Callable[[float, float], tuple[int, int]]
"""Maps a point that a model wrote to a pixel of the screen."""


def limit_of(space: CoordinateSpace) -> int:
    """The largest coordinate."""
    return {"model_pixels": MAX_PIXEL, "unit": 1, "thousand": 1000}[space]


def round_coordinate(value: float, space: CoordinateSpace) -> int | float:
    """The value in the model's format: an integer, except for `unit`."""
    return round(float(value), UNIT_DIGITS) if space == "unit" else round(value)


def to_screen(x: float, y: float, *, space: CoordinateSpace, image: Size, screen: Size) -> tuple[int, int]:
    """Maps a point that a model wrote to a pixel of the screen, clamped to it."""
    spans = image if space == "model_pixels" else (limit_of(space),) * 2
    return (
        min(round(x * screen[0] / spans[0]), screen[0] - 1),
        min(round(y * screen[1] / spans[1]), screen[1] - 1),
    )


def from_screen(x: float, y: float, *, space: CoordinateSpace, image: Size, screen: Size) -> tuple[float, float]:
    """Maps a pixel of the screen to the model's format, clamped to the image."""
    if space == "model_pixels":
        return min(round(x * image[0] / screen[0]), image[0] - 1), min(round(y * image[1] / screen[1]), image[1] - 1)
    limit = limit_of(space)
    return (
        min(round_coordinate(x * limit / screen[0], space), limit),
        min(round_coordinate(y * limit / screen[1], space), limit),
    )
