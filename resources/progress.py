"""Progress of long work: shown in Dagster's log, and passed to the progress bars of a run in this process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg
from pydantic import Field, PrivateAttr

from osworld_pipeline.runs.messages import Info, Message, Progress, Report, Warned

MIN_COUNTED_BYTES = 32 * 2**20
"""Smaller inputs get no progress lines."""
OnProgress = Callable[[Progress], None]
_watchers: dict[str, OnProgress] = {}
"""Watchers by the id of a Dagster run."""


@contextmanager
def watched_progress(run_id: str, on_progress: OnProgress) -> Iterator[None]:
    """`on_progress` receives the progress of this run while the block lasts, if its steps run in this process."""
    _watchers[run_id] = on_progress
    try:
        yield
    finally:
        del _watchers[run_id]


class ProgressResource(dg.ConfigurableResource):
    """Reports the progress of a stage periodically."""

    every_s: float = Field(
        default=20.0, description="Seconds between two lines of one stage; the last is always logged."
    )
    watched_every_s: float = Field(default=2.0, description="The same if a terminal shows them as bars.")
    _last: dict[str, float] = PrivateAttr(default_factory=dict)

    def listener(self, context: dg.AssetExecutionContext, stage: str) -> Report:
        """A callback for the messages of one stage."""
        return lambda message: self.handle(context, stage, message)

    def byte_counter(self, context: dg.AssetExecutionContext, stage: str) -> Callable[[str, int, int], None]:
        """A callback for library code in this process: its note, the bytes done, and the total."""

        def count(note: str, done: int, total: int) -> None:
            if total >= MIN_COUNTED_BYTES:
                self.update(context, Progress(stage=stage, done=done >> 20, total=total >> 20, note=f"MiB, {note}"))

        return count

    def handle(self, context: dg.AssetExecutionContext, stage: str, message: Message) -> None:
        """`message`: from the program of this stage."""
        match message:
            case Info():
                context.log.info(f"{stage}: {message.message}")
            case Warned():
                context.log.warning(f"{stage}: {message.message}")
            case Progress():
                self.update(context, message if message.stage else message.model_copy(update={"stage": stage}))
            case _:
                pass

    def update(self, context: dg.AssetExecutionContext, progress: Progress) -> None:
        watcher = _watchers.get(context.run.run_id)
        now, every_s = time.monotonic(), self.every_s if watcher is None else self.watched_every_s
        if progress.done < progress.total and now - self._last.get(progress.stage, -every_s) < every_s:
            return
        self._last[progress.stage] = now
        line = f"progress of {progress.stage}: {progress.done}/{progress.total} {progress.note}"
        context.log.info(line.rstrip())
        if watcher is not None:
            watcher(progress)
