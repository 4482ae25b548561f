"""A demonstration for a model that sees at most so many pixels: images too large, or with sides no patch divides, are
resized as a live screenshot is, and the points of the turns that answer them move with them.

This is done when a demonstration is rendered, not when it is imported: the stored images stay exact, and each recipe
has its own limit.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, UnidentifiedImageError

from osworld_pipeline.agent.dialects import Dialect
from osworld_pipeline.agent.images import ModelImage, fit_size, prepare_screenshot
from osworld_pipeline.agent.observation_text import assistant_message

POINT_KEYS = ("coordinate", "end_coordinate")


def fit_demonstration(
    messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], *, dialect: Dialect, max_pixels: int
) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """Turns and images as `render_demonstration` takes them. A turn whose image fits, or that names no point, stays as
    it is to the letter.

    Raises:
        ValueError: bytes that are no image, or placeholders and images that differ in number.
    """
    # Most images fit, which their header tells without decoding them.
    prepared = [None if _fits(image, max_pixels) else prepare_screenshot(image, max_pixels) for image in images]
    fitted: list[Mapping[str, Any]] = []
    num_seen = 0
    for message in messages:
        if message["role"] == "assistant":
            # A turn is about the newest image before it.
            image = prepared[num_seen - 1] if num_seen else None
            message = message if image is None else _moved(message, image, dialect)
        else:
            num_seen += sum(part["type"] == "image" for part in message["content"])
            if num_seen > len(prepared):
                break
        fitted.append(message)
    if num_seen != len(prepared):
        raise ValueError(f"a conversation whose image placeholders are not its {len(prepared)} images")
    return fitted, [data if image is None else image.data for data, image in zip(images, prepared, strict=True)]


def _fits(data: bytes, max_pixels: int) -> bool:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return fit_size(*image.size, max_pixels) == image.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"a screenshot of {len(data)} bytes is no image: {error}") from error


def _moved(message: Mapping[str, Any], image: ModelImage, dialect: Dialect) -> Mapping[str, Any]:
    turn = dialect.parse("".join(part["text"] for part in message["content"] if part["type"] == "text"))
    arguments = dict(turn.arguments or {})
    points = [key for key in POINT_KEYS if key in arguments]
    if not points:
        return message
    for key in points:
        arguments[key] = list(image.from_screen(*arguments[key]))
    return assistant_message(dialect.format(turn.description, arguments))
