"""System prompts of the dialects: `full` is a manual, `short` gives a tiny model only its role."""

from osworld_pipeline.dialects.coordinates import CoordinateSpace

COORDINATES = "<coordinates>"
"""Placeholder in a prompt for the description of its coordinate space."""
_LONG: dict[CoordinateSpace, str] = {
    "model_pixels": "Coordinates are pixels of the screenshot, from its top left corner.",
    "unit": "Coordinates are shares of the screenshot's width and height, from 0 to 1 with up to four decimals, from "
    "its top left corner.",
    "thousand": "Coordinates are whole numbers from 0 to 1000 over the screenshot's width and height, from its top "
    "left corner.",
}
_BRIEF: dict[CoordinateSpace, str] = {
    "model_pixels": "",
    "unit": " Coordinates: 0 to 1.",
    "thousand": " Coordinates: 0 to 1000.",
}


def fill_prompt(prompts: tuple[str, str], kind: str, space: CoordinateSpace) -> str:
    """The full or the short system prompt of a dialect, with the description of its coordinate space.

    Raises:
        ValueError: `kind` is neither full nor short.
    """
    full, short = prompts
    if kind == "full":
        return full.replace(COORDINATES, _LONG[space])
    if kind == "short":
        return short.replace(COORDINATES, _BRIEF[space])
    raise ValueError(f"no system prompt named '{kind}'; there are: full, short")
