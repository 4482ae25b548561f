"""Bars for runs that happen in this process: they read back what assets tell Dagster's log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from resources.progress import ProgressLine

LINE_EVERY_S = 15.0


class Bars:
    """Hears the events of runs: one bar for the assets, one for each stage that tells its progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_assets = 0
        self._assets = progress.add_task("assets", total=None, note="")
        self._stages: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()

    def expect(self, num_assets: int) -> None:
        """So many more are to be materialized."""
        self._num_assets += num_assets
        self._progress.update(self._assets, total=self._num_assets)

    def __call__(self, entry: dg.EventLogEntry) -> None:
        event = entry.dagster_event
        if event is None:
            self._hear(ProgressLine.parse(entry.user_message or ""))
        elif event.event_type == dg.DagsterEventType.STEP_START:
            self._progress.update(self._assets, note=escape(event.step_key or ""))
        elif event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            self._progress.update(self._assets, advance=1, note="")

    def _hear(self, line: ProgressLine | None) -> None:
        if line is None:
            return
        if line.stage not in self._stages:
            self._stages[line.stage] = self._progress.add_task(line.stage, total=line.total, note="")
        self._progress.update(self._stages[line.stage], completed=line.done, total=line.total, note=escape(line.note))
        if not self._progress.console.is_terminal and self._is_time_for_a_line(line):
            # Bars are drawn on terminals only; whoever reads a log sees a line now and then.
            self._progress.console.print(f"{line.stage}: {line.done}/{line.total} {line.note}", highlight=False)

    def _is_time_for_a_line(self, line: ProgressLine) -> bool:
        now = time.monotonic()
        if line.done < line.total and now - self._last_line_s < LINE_EVERY_S:
            return False
        self._last_line_s = now
        return True


@contextmanager
def shown_bars(console: Console) -> Iterator[Bars]:
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)
