"""What a part of the GPU measurement has found so far: figures, and claims that are met or not. It is written to a
file after each of them, so that a part that fails or is killed loses nothing that it had."""

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
    """Of a part that failed; why one was not run."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok" and all(claim.is_met for claim in self.claims)

    @classmethod
    def read(cls, file: Path, name: str) -> "PartResult":
        """An empty one where the part wrote nothing."""
        try:
            told: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            return cls(name=name)
        told["figures"] = [Figure(**each) for each in told["figures"]]
        told["claims"] = [Claim(**each) for each in told["claims"]]
        return cls(**told)


class Sheet:
    """`file` None keeps the result in memory alone."""

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
    """What the part measures is not installed here; the sentence says what is missing."""
