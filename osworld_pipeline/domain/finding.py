"""What a check of a machine found: by `osworld-pipeline doctor`, and by the env server, which it asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but slower, smaller or with more care."""
    MISSING = "missing"
    """What is checked cannot be used."""
    BROKEN = "broken"
    """The check itself failed or did not end, so nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    """Of what was checked: one name, one finding."""
    status: Status
    message: str
    """One sentence."""
    remedy: str = ""
    """How to get it, a command where there is one; empty where nothing is to be done."""

    @classmethod
    def of_error(cls, name: str, error: Exception, status: Status = Status.MISSING) -> Self:
        """Of an error of ours, whose sentence ends with the way out: `what is wrong; what to do`."""
        message, _, remedy = str(error).rpartition("; ")
        return cls(name=name, status=status, message=message or remedy, remedy=remedy if message else "")

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> Self:
        """Of its `as_json`. Raises KeyError, ValueError."""
        return cls(
            name=fields["name"],
            status=Status(fields["status"]),
            message=fields["message"],
            remedy=fields["remedy"],
        )

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status.value, "message": self.message, "remedy": self.remedy}
