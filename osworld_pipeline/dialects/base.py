"""The interface between a model's text and a desktop's commands: one class for all dialects, with a grammar each."""

from collections.abc import Callable
from dataclasses import dataclass

from osworld_pipeline.dialects.actions import Arguments, Vocabulary, action_type, normalise
from osworld_pipeline.dialects.commands import to_command
from osworld_pipeline.dialects.coordinates import CoordinateSpace, ScalePoint
from osworld_pipeline.dialects.prompts import fill_prompt
from osworld_pipeline.errors import ActionParseError


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """One parsed assistant turn. `arguments` is None if and only if it could not be parsed."""

    description: str = ""
    """The model's description of its action, on one line."""
    arguments: Arguments | None
    """The action in normal form, with coordinates as the model wrote them."""
    action_type: str
    """The action's name; `unknown` if it could not be parsed."""
    fallback_used: bool = False
    error: str | None = None

    @property
    def is_parsed(self) -> bool:
        return self.arguments is not None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of a grammar: an action that is not normalised yet."""

    raw: Arguments
    fallback_used: bool = False


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The definition of a dialect."""

    name: str
    stop: tuple[str, ...]
    """Sampling ends after the first of these; empty if only the end of the turn ends it."""
    coordinate_space: CoordinateSpace
    """The coordinate space if a recipe does not set one."""
    vocabulary: Vocabulary
    prompts: tuple[str, str]
    """The full and the short system prompt."""
    describe: Callable[[str], str]
    read: Callable[[str, CoordinateSpace], Reading]
    """Raises ActionParseError if there is no action."""
    write: Callable[[str, Arguments], str]
    """Writes a one-line description and an action in normal form as a turn; raises ActionParseError if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A grammar with a coordinate space."""

    grammar: Grammar
    coordinate_space: CoordinateSpace

    @property
    def name(self) -> str:
        """The name for `load_dialect`; includes the coordinate space if it is not the grammar's default."""
        own = self.coordinate_space == self.grammar.coordinate_space
        return self.grammar.name if own else f"{self.grammar.name}@{self.coordinate_space}"

    @property
    def stop(self) -> tuple[str, ...]:
        return self.grammar.stop

    def system_prompt(self, kind: str) -> str:
        """
        Raises:
            ValueError: `kind` is neither full nor short.
        """
        return fill_prompt(self.grammar.prompts, kind, self.coordinate_space)

    def parse(self, text: str) -> ParsedTurn:
        """Never raises: a turn that cannot be parsed is a ParsedTurn with an error."""
        description = self.grammar.describe(text)
        try:
            reading = self.grammar.read(text, self.coordinate_space)
            arguments = self._normalised(reading.raw)
        except ActionParseError as error:
            return ParsedTurn(description=description, arguments=None, action_type="unknown", error=str(error))
        return ParsedTurn(
            description=description,
            arguments=arguments,
            action_type=action_type(arguments),
            fallback_used=reading.fallback_used,
        )

    def parse_strict(self, text: str) -> ParsedTurn:
        """Raises ActionParseError if not even a fallback can parse the turn."""
        turn = self.parse(text)
        if turn.arguments is None:
            raise ActionParseError(f"no action could be read: {turn.error}; the turn begins {text[:60]!r}")
        return turn

    def format(self, description: str, arguments: Arguments) -> str:
        """The turn in the dialect's standard form; `parse` returns the same arguments for it.

        Raises:
            ActionParseError: the dialect cannot express it.
        """
        action = self._normalised(arguments)
        text = self.grammar.write(" ".join(description.split()), action)
        turn = self.parse(text)
        if turn.arguments != action or turn.fallback_used:
            raise ActionParseError(f"{action_type(action)} with these arguments cannot be expressed in {self.name}")
        return text

    def to_command(self, arguments: Arguments, scale: ScalePoint | None = None) -> str:
        """The command for a desktop; `scale` maps points as the model wrote them to the screen. If the turn also ends
        the task, `split_command` splits the result."""
        return to_command(arguments, scale)

    def _normalised(self, raw: Arguments) -> dict:
        return normalise(raw, space=self.coordinate_space, vocabulary=self.grammar.vocabulary)
