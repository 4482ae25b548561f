"""A question of the cookbook, with the SQL that answers it and notes on reading the answer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    name: str
    """The name on the command line: `osworld-pipeline cookbook NAME`."""
    question: str
    sql: str
    """One SELECT over the views, without parameters and without a semicolon."""
    reading: str
    """The meaning of columns that their names do not give."""
