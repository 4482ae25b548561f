"""Results of a part of the GPU measurement so far: figures, and checks that are met or not. They are written to a
file after each of them, so that a part that fails or is killed keeps its results."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import BenchmarkError

Status = Literal["ok", "failed", "timed out", "not run"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    sentence: str
    is_met: bool


@dataclass(kw_only=True)
class PartResult:
    name: str
    status: Status = "not run"
    seconds: float = 0.0
    device: str = ""
    figures: list[Figure] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    error: str = ""
    """Error of a part that failed, or the reason why it was not run."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok" and all(claim.is_met for claim in self.claims)

    @classmethod
    def read(cls, file: Path, name: str) -> "PartResult":
        """The result in the file, or an empty one if the part wrote none."""
        try:
            stored: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            return cls(name=name)
        stored["figures"] = [Figure(**each) for each in stored["figures"]]
        stored["claims"] = [Claim(**each) for each in stored["claims"]]
        return cls(**stored)


class Sheet:
    """The results of a run. With `file` None they are kept only in memory."""

    def __init__(self, name: str, *, file: Path | None = None) -> None:
        self.result = PartResult(name=name)
        self._file = file

    def figure(self, name: str, value: str) -> None:
        self.result.figures.append(Figure(name=name, value=value))
        self.write()

    def claim(self, sentence: str, is_met: bool) -> None:
        self.result.claims.append(Claim(sentence=sentence, is_met=bool(is_met)))
        self.write()

    def write(self) -> None:
        if self._file is None:
            return
        temp = self._file.with_suffix(".part")
        temp.write_text(json.dumps(asdict(self.result), indent=1))
        temp.replace(self._file)


class NotMeasured(BenchmarkError):
    """The part cannot be measured here: software or a GPU is missing; the message says which."""
