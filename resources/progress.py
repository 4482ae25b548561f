"""Progress of long work, told in Dagster's log; whoever shows bars reads it back from there."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

LOG_EVERY_S = 2.0
_LINE = re.compile(r"^progress of (?P<stage>[\w ]+): (?P<done>\d+)/(?P<total>\d+)(?: (?P<note>.*))?$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    stage: str
    done: int
    total: int
    note: str

    def __str__(self) -> str:
        return f"progress of {self.stage}: {self.done}/{self.total} {self.note}".rstrip()

    @classmethod
    def parse(cls, text: str) -> "ProgressLine | None":
        match = _LINE.match(text)
        if match is None:
            return None
        return cls(stage=match["stage"], done=int(match["done"]), total=int(match["total"]), note=match["note"] or "")


class ProgressResource(dg.ConfigurableResource):
    """Tells how far a stage is, at most every two seconds."""

    _last: dict[str, float] = PrivateAttr(default_factory=dict)

    def listener(self, context: dg.AssetExecutionContext, stage: str) -> Callable[[Mapping[str, Any]], None]:
        """`hear` bound to one stage."""
        return lambda message: self.hear(context, stage, message)

    def hear(self, context: dg.AssetExecutionContext, stage: str, message: Mapping[str, Any]) -> None:
        """A program's message `{"kind": "progress", "done", "total", "note"}`; it may name a `stage` of its own."""
        if message["kind"] == "progress":
            line = ProgressLine(
                stage=message.get("stage", stage),
                done=message["done"],
                total=message["total"],
                note=message.get("note", ""),
            )
            self.update(context, line)

    def update(self, context: dg.AssetExecutionContext, line: ProgressLine) -> None:
        now = time.monotonic()
        if line.done < line.total and now - self._last.get(line.stage, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._last[line.stage] = now
        context.log.info(str(line))
