"""The declaration of a stored field. A table's column, its type, its rows and its documentation derive from it
(columns/records.py)."""

from dataclasses import dataclass

SECONDS, UNIX_TIME, UTC, PIXELS, NUM_BYTES, TOKENS, SHARE, NATS = (
    "s",
    "s since 1970",
    "UTC",
    "px",
    "bytes",
    "tokens",
    "0..1",
    "nats",
)


@dataclass(frozen=True)
class Stored:
    """Marks a field of a frozen dataclass as a column: `num_steps: Annotated[int, Stored("Number of actions.")] = 0`.

    A column that older files lack reads as the field's default.
    """

    doc: str
    unit: str = ""
    """UTC makes the column of a float a timestamp; the field is in Unix time, and 0 or None is NULL."""
    name: str = ""
    """Name of the column; empty: that of the field."""
    bits: int = 64
    """Width of an integer in the file."""
    since: int = 0
    """Version of the columns in which it was added or widened (columns/); 0: before 12."""
