"""The seam between a model's words and a desktop's commands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

CoordinateSpace = Literal["model_pixels"]
"""`model_pixels`: coordinates count pixels of the image the model saw, after resizing."""

ScalePoint = Callable[[float, float], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """One assistant turn, read. `arguments` and `command` are None exactly where nothing could be read."""

    description: str = ""
    """The text of the `Action:` line."""
    arguments: Mapping[str, Any] | None
    """The action in its normal form, coordinates as the model wrote them."""
    action_type: str
    """The action's name; `unknown` where nothing could be read."""
    command: str | None
    """For a desktop whose screen has the size of the model's image; `Dialect.to_command` scales otherwise."""
    fallback_used: bool = False
    error: str | None = None

    @property
    def is_parsed(self) -> bool:
        return self.arguments is not None


class Dialect(Protocol):
    name: str
    stop: tuple[str, ...]
    """Sampling ends after the first of these."""
    coordinate_space: CoordinateSpace

    def system_prompt(self, kind: str) -> str: ...

    def parse(self, text: str) -> ParsedTurn:
        """Never raises: what cannot be read is a ParsedTurn with an error."""
        ...

    def parse_strict(self, text: str) -> ParsedTurn:
        """Raises ActionParseError where not even a fallback can read the turn."""
        ...

    def format(self, description: str, arguments: Mapping[str, Any]) -> str:
        """The turn as a model should write it; `parse` reads the same arguments back."""
        ...

    def to_command(self, arguments: Mapping[str, Any], scale: ScalePoint | None = None) -> str: ...
