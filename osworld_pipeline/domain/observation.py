"""What a desktop shows at one moment."""

from dataclasses import dataclass
from typing import Literal

Settle = Literal["fixed", "adaptive"]
"""How the pause after an action goes: the whole of it, or until the screen has settled and at most the whole of it."""

MAX_PIXELS = 64 * 1024 * 1024
"""Of one screenshot: twice an 8K screen. A larger picture is refused before it is decoded."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    screenshot: bytes
    """The encoded image as the env server sent it."""
    image_format: str = "png"
    accessibility_tree: str | None = None
    terminal: str | None = None
    """Text of the focused terminal, where there is one."""
    instruction: str = ""
    screen_size: tuple[int, int] | None = None
    """(width, height) of the screen where the screenshot was resized; None where it is the screenshot's own."""
