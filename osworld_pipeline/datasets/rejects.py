"""Rejected records and files, with place and reason."""

from dataclasses import dataclass
from typing import Literal

RejectKind = Literal[
    "malformed", "too_long", "unreadable", "dropped_parse", "bad_image", "bad_task", "duplicate_task", "duplicate_file"
]
"""`malformed`: not a JSON object, or a field is missing or invalid. `too_long`: a line over the limit. `unreadable`: a
file, or the rest of it. `dropped_parse`: a turn that is not an action. `bad_image`: an image is missing, surplus or
damaged. `bad_task`: a config that cannot be run. `duplicate_task`: a task whose id another task has. `duplicate_file`:
a source that exists twice."""


@dataclass(frozen=True, kw_only=True)
class Reject:
    source: str
    path: str
    line_no: int
    """Line number, from 1; 0 for a whole file."""
    reason: str
    kind: str = "malformed"
    """A RejectKind; an import may use others."""
    task_id: str = ""


class BadRecord(Exception):
    """Why a record cannot be used; becomes a Reject."""

    def __init__(self, reason: str, *, kind: RejectKind = "malformed", task_id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: RejectKind = kind
        self.task_id = task_id
