"""The seam between a model's words and a desktop's commands: one shape for every dialect, filled with its grammar."""

from collections.abc import Callable
from dataclasses import dataclass

from osworld_pipeline.agent.coordinates import CoordinateSpace, ScalePoint
from osworld_pipeline.agent.dialects.actions import Arguments, Vocabulary, action_type, normalise
from osworld_pipeline.agent.dialects.commands import to_command
from osworld_pipeline.agent.prompts import fill_prompt
from osworld_pipeline.errors import ActionParseError


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """One assistant turn, read. `arguments` is None exactly where nothing could be read."""

    description: str = ""
    """What the model says it does, in one line."""
    arguments: Arguments | None
    """The action in normal form, coordinates as the model wrote them."""
    action_type: str
    """The action's name; `unknown` where nothing could be read."""
    fallback_used: bool = False
    error: str | None = None

    @property
    def is_parsed(self) -> bool:
        return self.arguments is not None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a grammar found in a turn: an action not normalised yet."""

    raw: Arguments
    fallback_used: bool = False


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A dialect as data."""

    name: str
    stop: tuple[str, ...]
    """Sampling ends after the first of these; none where only the end of the turn ends it."""
    coordinate_space: CoordinateSpace
    """What coordinates count where a recipe does not say."""
    vocabulary: Vocabulary
    prompts: tuple[str, str]
    """The full and the short system prompt."""
    describe: Callable[[str], str]
    read: Callable[[str, CoordinateSpace], Reading]
    """Raises ActionParseError where there is no action."""
    write: Callable[[str, Arguments], str]
    """A description of one line and an action in normal form as a turn; what cannot be said so is ActionParseError."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a model writes an action: a grammar, and what its coordinates count."""

    grammar: Grammar
    coordinate_space: CoordinateSpace

    @property
    def name(self) -> str:
        """What `load_dialect` finds it by; the space is named where it is not the grammar's own."""
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
        """Never raises: what cannot be read is a ParsedTurn with an error."""
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
        """Raises ActionParseError where not even a fallback can read the turn."""
        turn = self.parse(text)
        if turn.arguments is None:
            raise ActionParseError(f"no action could be read: {turn.error}; the turn begins {text[:60]!r}")
        return turn

    def format(self, description: str, arguments: Arguments) -> str:
        """The turn as a model should write it; `parse` reads the same arguments back.

        Raises:
            ActionParseError: the dialect cannot say it.
        """
        action = self._normalised(arguments)
        text = self.grammar.write(" ".join(description.split()), action)
        turn = self.parse(text)
        if turn.arguments != action or turn.fallback_used:
            raise ActionParseError(f"{action_type(action)} with these arguments cannot be said in {self.name}")
        return text

    def to_command(self, arguments: Arguments, scale: ScalePoint | None = None) -> str:
        """For a desktop; `scale` maps points as the model wrote them to the screen. `split_command` says what to send
        where the turn also ends the task."""
        return to_command(arguments, scale)

    def _normalised(self, raw: Arguments) -> dict:
        return normalise(raw, space=self.coordinate_space, vocabulary=self.grammar.vocabulary)
