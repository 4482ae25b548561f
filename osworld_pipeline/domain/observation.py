"""An observation of a desktop at one moment."""

from dataclasses import dataclass
from typing import Literal

Settle = Literal["fixed", "adaptive"]
"""Mode of the pause after an action: its full length, or until the screen has settled, at most the full length."""

MAX_PIXELS = 64 * 1024 * 1024
"""Limit for one screenshot: twice an 8K screen. A larger image is refused before it is decoded."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    screenshot: bytes
    """The encoded image as the env server sent it."""
    image_format: str = "png"
    accessibility_tree: str | None = None
    terminal: str | None = None
    """Text of the focused terminal, if there is one."""
    instruction: str = ""
    screen_size: tuple[int, int] | None = None
    """(width, height) of the screen if the screenshot was resized; None if it is that of the screenshot."""
    num_person_inputs: int = 0
    """Inputs that a person has sent to the desktop in this episode."""
