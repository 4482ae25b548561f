"""Dialects: how a model writes an action, and how that becomes a command for a desktop."""

from osworld_pipeline.agent.coordinates import COORDINATE_SPACES
from osworld_pipeline.agent.dialects.base import Dialect, Grammar, ParsedTurn
from osworld_pipeline.agent.dialects.calls import CALLS
from osworld_pipeline.agent.dialects.pyautogui import PYAUTOGUI
from osworld_pipeline.agent.dialects.sendkey import SENDKEY
from osworld_pipeline.agent.dialects.slime import SLIME

__all__ = ["GRAMMARS", "STORED_DIALECT", "Dialect", "ParsedTurn", "load_dialect"]

GRAMMARS: dict[str, Grammar] = {grammar.name: grammar for grammar in (SLIME, PYAUTOGUI, SENDKEY, CALLS)}

STORED_DIALECT = "slime"
"""In which demonstrations are built and recorded; what a recipe's agent speaks they are said in when it sees them."""


def load_dialect(name: str, coordinate_space: str = "dialect") -> Dialect:
    """The dialect a recipe or a demonstration names: `slime`, or `slime@unit` with what its coordinates count.

    Raises:
        ValueError: no such dialect, or no such coordinate space.
    """
    name, _, own_space = name.partition("@")
    grammar = GRAMMARS.get(name)
    if grammar is None:
        raise ValueError(f"no dialect named '{name}'; there are: {', '.join(GRAMMARS)}")
    wanted = grammar.coordinate_space if coordinate_space == "dialect" else coordinate_space
    wanted = own_space or wanted
    for space in COORDINATE_SPACES:
        if space == wanted:
            return Dialect(grammar=grammar, coordinate_space=space)
    raise ValueError(f"no coordinate space named '{wanted}'; there are: {', '.join(COORDINATE_SPACES)}")
