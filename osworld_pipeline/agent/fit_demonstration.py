"""Adapts a demonstration to a model with a pixel limit and a dialect of its own. Images that are too large, or whose
sides are not multiples of a patch, are resized like a live screenshot. The turns that answer them are rewritten if
their points move or the dialect differs.

This is done when a demonstration is rendered, not on import: the stored images stay exact, and each recipe has its own
limit, dialect and coordinates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.agent.images import fit_size, prepare_screenshot
from osworld_pipeline.agent.observation_text import assistant_message
from osworld_pipeline.dialects import Dialect
from osworld_pipeline.dialects.actions import Arguments, at_pointer, first_point, last_point, move_points
from osworld_pipeline.dialects.coordinates import Size, from_screen, to_screen
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.errors import ActionParseError


def fit_demonstration(
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[bytes],
    *,
    dialect: Dialect,
    max_pixels: int,
    target: Dialect | None = None,
) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """Turns and images for `render_demonstration`, translated to `target` (None keeps the dialect). In the same dialect
    a turn is unchanged if its image fits, if it has no point, or if the coordinates do not depend on the image's size.

    Raises:
        ValueError: the bytes are not an image, the numbers of placeholders and images differ, or a turn cannot be
            expressed in the other dialect.
    """
    translator = _Translator(dialect, target or dialect)
    fitted_images = [_fit(image, max_pixels) for image in images]
    fitted: list[Mapping[str, Any]] = []
    num_seen = 0
    for message in messages:
        if message["role"] == "assistant":
            # A turn refers to the newest image before it.
            message = translator.translate(message, fitted_images[num_seen - 1] if num_seen else None)
        else:
            num_seen += sum(part["type"] == "image" for part in message["content"])
            if num_seen > len(images):
                break
        fitted.append(message)
    if num_seen != len(images):
        raise ValueError(f"the conversation has {num_seen} image placeholders and {len(images)} images")
    return fitted, [image.data for image in fitted_images]


@dataclass(frozen=True, kw_only=True)
class _FittedImage:
    data: bytes
    size: Size
    stored: Size
    """Size before resizing: the image that recorded points refer to."""


def _fit(data: bytes, max_pixels: int) -> _FittedImage:
    # Most images fit; their header shows it without decoding them.
    try:
        with open_picture(data) as image:
            stored = image.size
    except NO_PICTURE as error:
        raise ValueError(f"a screenshot of {len(data)} bytes is not an image: {error}") from error
    if fit_size(*stored, max_pixels) == stored:
        return _FittedImage(data=data, size=stored, stored=stored)
    prepared = prepare_screenshot(data, max_pixels)
    return _FittedImage(data=prepared.data, size=(prepared.width, prepared.height), stored=stored)


class _Translator:
    """Translates turns of one demonstration, in order."""

    def __init__(self, source: Dialect, target: Dialect) -> None:
        self._source = source
        self._target = target
        self._pointer: list[int | float] | None = None
        """Position after the last action, in the target's coordinates."""

    def translate(self, message: Mapping[str, Any], image: _FittedImage | None) -> Mapping[str, Any]:
        same = self._source == self._target
        if same and (image is None or image.size == image.stored or self._source.coordinate_space != "model_pixels"):
            return message
        text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        turn = self._source.parse(text)
        if turn.arguments is None:
            if same:
                return message
            raise ValueError(f"a turn cannot be read in the dialect {self._source.name}: {turn.error}")
        if first_point(turn.arguments) is None:
            arguments = turn.arguments
            if same:
                return message
        elif image is None:
            raise ValueError("a turn has coordinates, but there is no image before it")
        else:
            arguments = self._moved(turn.arguments, image)
        said = self._say(turn.description, arguments)
        self._pointer = last_point(arguments) or self._pointer
        return assistant_message(said)

    def _moved(self, arguments: Arguments, image: _FittedImage) -> dict[str, Any]:
        def move(x: float, y: float) -> tuple[float, float]:
            pixel = to_screen(x, y, space=self._source.coordinate_space, image=image.stored, screen=image.stored)
            return from_screen(*pixel, space=self._target.coordinate_space, image=image.size, screen=image.stored)

        return move_points(arguments, move)

    def _say(self, description: str, arguments: Arguments) -> str:
        """If the dialect requires the place of a scroll or the start of a drag, it is the pointer's position."""
        forms = [arguments]
        if self._pointer is not None and self._source != self._target:
            forms.append(at_pointer(arguments, self._pointer))
        problem = None
        for form in forms:
            try:
                return self._target.format(description, form)
            except ActionParseError as error:
                problem = error
        raise ValueError(f"a turn cannot be expressed in the dialect {self._target.name}: {problem}") from problem
