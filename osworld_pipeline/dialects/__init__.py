"""Dialects: the formats in which a model writes actions, and their conversion to desktop commands."""

from typing import TYPE_CHECKING, Literal

from osworld_pipeline.dialects.base import Dialect, Grammar, ParsedTurn
from osworld_pipeline.dialects.coordinates import COORDINATE_SPACES
from osworld_pipeline.dialects.osgym import OSGYM
from osworld_pipeline.dialects.pyautogui import PYAUTOGUI
from osworld_pipeline.dialects.sendkey import SENDKEY
from osworld_pipeline.dialects.slime import SLIME

__all__ = ["GRAMMARS", "STORED_DIALECT", "Dialect", "DialectName", "ParsedTurn", "load_dialect"]

GRAMMARS: dict[str, Grammar] = {grammar.name: grammar for grammar in (SLIME, PYAUTOGUI, SENDKEY, OSGYM)}
if TYPE_CHECKING:
    DialectName = str
else:
    DialectName = Literal[tuple(GRAMMARS)]

STORED_DIALECT = "slime"
"""The dialect in which demonstrations are built and recorded; for a recipe's agent they are translated to its own."""


def load_dialect(name: str, coordinate_space: str = "dialect") -> Dialect:
    """The dialect that a recipe or a demonstration names: `slime`, or `slime@unit` with a coordinate space.
    `coordinate_space` is used if the name has none; `dialect`: the dialect's default.

    Raises:
        ValueError: there is no such dialect or coordinate space.
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
