"""A question of the cookbook: what people ask, the SQL that answers it, and how to read the answer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    name: str
    """For the command line: `osworld-pipeline cookbook NAME`."""
    question: str
    sql: str
    """One SELECT over the views, without parameters and without a semicolon."""
    reading: str
    """What the columns mean where their names do not say it."""
