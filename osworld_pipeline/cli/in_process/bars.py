"""Progress bars for runs in this process, with rate and remaining time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import dagster as dg
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from osworld_pipeline.runs.messages import Progress as StageProgress

LINE_EVERY_S = 15.0
SPEED_WINDOW_S = 300.0
"""Time window for a rate: an episode may take a minute."""


class RateColumn(ProgressColumn):
    """The rate per second, minute or hour, in the most readable unit."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(shown_rate(speed) if speed else "", style="progress.data.speed", justify="right")


class Bars:
    """One bar for the assets, which follows Dagster's events, and one for each stage that reports progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_assets = 0
        self._assets = progress.add_task("assets", total=None, note="", visible=False)
        self._stages: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()

    def expect(self, num_assets: int) -> None:
        """Adds this number of assets to materialize."""
        self._num_assets += num_assets
        self._progress.update(self._assets, total=self._num_assets, visible=True)

    def show_wait(self, sentence: str) -> None:
        """Shows why a run waits to start; empty when the wait is over."""
        self._progress.update(self._assets, note=escape(sentence))
        if sentence:
            self._progress.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, entry: dg.EventLogEntry) -> None:
        event = entry.dagster_event
        if event is None:
            return
        if event.event_type == dg.DagsterEventType.STEP_START:
            self._progress.update(self._assets, note=escape(event.step_key or ""))
        elif event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            self._progress.update(self._assets, advance=1)
        elif event.event_type in (dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_FAILURE):
            self._progress.update(self._assets, note="")

    def show(self, line: StageProgress) -> None:
        if line.stage not in self._stages:
            self._stages[line.stage] = self._progress.add_task(line.stage, total=line.total, note="")
        stage = self._stages[line.stage]
        self._progress.update(stage, completed=line.done, total=line.total, note=escape(line.note))
        if not self._progress.console.is_terminal and self._is_time_for_a_line(line):
            # Bars are drawn on terminals only; a log gets periodic lines.
            self._progress.console.print(log_line(line, self._task(stage)), highlight=False, soft_wrap=True)

    def _task(self, task_id: TaskID) -> Task:
        return next(task for task in self._progress.tasks if task.id == task_id)

    def _is_time_for_a_line(self, line: StageProgress) -> bool:
        now = time.monotonic()
        if line.done < line.total and now - self._last_line_s < LINE_EVERY_S:
            return False
        self._last_line_s = now
        return True


def log_line(line: StageProgress, task: Task) -> str:
    """`sft: 40/500, 3.1/s, 0:02:28 to go: loss 0.4`; unknown parts are omitted."""
    parts = [f"{line.stage}: {line.done}/{line.total}"]
    if task.speed:
        parts.append(shown_rate(task.speed))
    if task.time_remaining:
        parts.append(f"{timedelta(seconds=int(task.time_remaining))} to go")
    return escape(", ".join(parts) + (f": {line.note}" if line.note else ""))


def shown_rate(per_s: float) -> str:
    """The rate with two or three digits, also if it is slow."""
    value, unit = (per_s, "s") if per_s >= 1 else (per_s * 60, "min") if per_s * 60 >= 1 else (per_s * 3600, "h")
    return f"{value:.0f}/{unit}" if value >= 10 else f"{value:.1f}/{unit}"


@contextmanager
def shown_bars(console: Console) -> Iterator[Bars]:
    with make_progress(console) as progress:
        yield Bars(progress)


def make_progress(console: Console) -> Progress:
    """Designed for 80 columns: figures are not truncated, and the note gets the remaining width. The time is the
    remaining time, and at the end the elapsed time."""

    def whole(width: int) -> Column:
        return Column(no_wrap=True, min_width=width, justify="right")

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<20}", table_column=Column(no_wrap=True, min_width=20)),
        BarColumn(bar_width=6),
        MofNCompleteColumn(table_column=whole(7)),
        RateColumn(table_column=whole(7)),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=whole(7)),
        TextColumn("[dim]{task.fields[note]}[/]", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    return Progress(*columns, console=console, speed_estimate_period=SPEED_WINDOW_S, expand=True)
