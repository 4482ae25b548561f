"""Progress of long work, written to Dagster's log, where the progress bars read it."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field, PrivateAttr

WATCHED_TAG = "osworld/demo_pid"
"""Tag of a run whose progress is shown as bars: the id of its process."""
MIN_COUNTED_BYTES = 32 * 2**20
"""Smaller inputs get no progress lines."""
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
    """Reports the progress of a stage periodically."""

    every_s: float = Field(
        default=20.0, description="Seconds between two lines of one stage; the last is always logged."
    )
    watched_every_s: float = Field(default=2.0, description="The same if a terminal shows them as bars.")
    _last: dict[str, float] = PrivateAttr(default_factory=dict)

    def listener(self, context: dg.AssetExecutionContext, stage: str) -> Callable[[Mapping[str, Any]], None]:
        """A callback for the messages of one stage."""
        return lambda message: self.handle(context, stage, message)

    def byte_counter(self, context: dg.AssetExecutionContext, stage: str) -> Callable[[str, int, int], None]:
        """A callback for library code in this process: its note, the bytes done, and the total."""

        def count(note: str, done: int, total: int) -> None:
            if total >= MIN_COUNTED_BYTES:
                self.update(context, ProgressLine(stage=stage, done=done >> 20, total=total >> 20, note=f"MiB, {note}"))

        return count

    def handle(self, context: dg.AssetExecutionContext, stage: str, message: Mapping[str, Any]) -> None:
        """A program's message: `{"kind": "progress", "done", "total", "note"}`, which may name a `stage` of its own, or
        `{"kind": "warning", "message"}`, or `{"kind": "reward", "message"}`."""
        if message["kind"] == "reward":
            context.log.info(f"{stage}: {message['message']}")
        if message["kind"] == "warning":
            context.log.warning(f"{stage}: {message['message']}")
        if message["kind"] == "progress":
            line = ProgressLine(
                stage=message.get("stage", stage),
                done=message["done"],
                total=message["total"],
                note=message.get("note", ""),
            )
            self.update(context, line)

    def update(self, context: dg.AssetExecutionContext, line: ProgressLine) -> None:
        now, every_s = time.monotonic(), self.watched_every_s if context.has_tag(WATCHED_TAG) else self.every_s
        if line.done < line.total and now - self._last.get(line.stage, -every_s) < every_s:
            return
        self._last[line.stage] = now
        context.log.info(str(line))
