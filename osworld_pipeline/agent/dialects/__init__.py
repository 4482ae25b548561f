"""Dialects: how a model writes an action, and how that becomes a command for a desktop."""

from osworld_pipeline.agent.dialects.base import Dialect, ParsedTurn
from osworld_pipeline.agent.dialects.slime import SlimeDialect

__all__ = ["Dialect", "ParsedTurn", "SlimeDialect", "load_dialect"]


def load_dialect(name: str) -> Dialect:
    """The dialect a recipe names.

    Raises:
        ValueError: no such dialect.
    """
    if name == "slime":
        return SlimeDialect()
    raise ValueError(f"no dialect named '{name}'; there is: slime")
