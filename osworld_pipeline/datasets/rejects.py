"""What could not be used: where it stands, and why."""

from dataclasses import dataclass
from typing import Literal

RejectKind = Literal[
    "malformed", "too_long", "unreadable", "dropped_parse", "bad_image", "bad_task", "duplicate_task", "duplicate_file"
]
"""`malformed`: no record. `too_long`: a line over the limit. `unreadable`: a file, or its rest. `dropped_parse`: a turn
that is no action. `bad_image`: one that is missing, too many or damaged. `bad_task`: a config nothing can run.
`duplicate_task`: a file of the tree whose id another one has. `duplicate_file`: a source that is there twice."""


@dataclass(frozen=True, kw_only=True)
class Reject:
    source: str
    path: str
    line_no: int
    """From 1; 0 for a whole file."""
    reason: str
    kind: str = "malformed"
    """A RejectKind; an import may bring others."""
    task_id: str = ""


class BadRecord(Exception):
    """Why a record cannot be used; becomes a Reject."""

    def __init__(self, reason: str, *, kind: RejectKind = "malformed", task_id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: RejectKind = kind
        self.task_id = task_id
