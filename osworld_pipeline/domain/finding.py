"""The result of a check of a machine, made by `osworld-pipeline doctor` or by the env server for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but with limitations."""
    MISSING = "missing"
    """The checked item cannot be used."""
    BROKEN = "broken"
    """The check itself failed or did not finish."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    """Name of the checked item; one finding per name."""
    status: Status
    message: str
    """One sentence."""
    remedy: str = ""
    """How to fix it, if possible a command; empty if no action is needed."""

    @classmethod
    def of_error(cls, name: str, error: Exception, status: Status = Status.MISSING) -> Self:
        """The finding for an error of ours, whose message ends with the remedy: `what is wrong; what to do`."""
        message, _, remedy = str(error).rpartition("; ")
        return cls(name=name, status=status, message=message or remedy, remedy=remedy if message else "")

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> Self:
        """The finding from its `as_json`. Raises KeyError, ValueError."""
        return cls(
            name=fields["name"],
            status=Status(fields["status"]),
            message=fields["message"],
            remedy=fields["remedy"],
        )

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status.value, "message": self.message, "remedy": self.remedy}
