"""Progress of long commands on standard error, for a person at a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Display
from rich.text import Text

from osworld_pipeline.progress import BYTES, OnProgress, Progress


@contextmanager
def shown_progress(name: str, *, as_json: bool = False) -> Iterator[OnProgress | None]:
    """A spinner with `name`, and from the first report on a bar with what is being done, how much of it, and the
    remaining time; removed at the end. Without a terminal, or with --json, nothing is shown and the callback is
    None."""
    if as_json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield None
        return
    with Display(*make_columns(), console=Console(stderr=True), transient=True) as display:
        yield _Shown(display, name)


def make_columns() -> tuple[ProgressColumn, ...]:
    return SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), _Count(), TimeRemainingColumn()


def counter(on_progress: OnProgress | None, what: str, unit: str) -> Callable[[int, int], None] | None:
    """For library code that reports one kind of work, as done and total."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(Progress(what, done, total, unit))


class _Shown:
    """Shows one kind of work at a time: the speed of one is no estimate for the next."""

    def __init__(self, display: Display, name: str) -> None:
        self._display = display
        self._what = name
        self._task = display.add_task(escape(name), total=None, unit="")

    def __call__(self, progress: Progress) -> None:
        total = progress.total or None
        if progress.what != self._what:
            self._display.remove_task(self._task)
            self._what = progress.what
            self._task = self._display.add_task(escape(progress.what), total=total, unit=progress.unit)
        self._display.update(self._task, completed=progress.done, total=total, unit=progress.unit)


class _Count(ProgressColumn):
    """`12/340 files`, `1.2 GB/3.4 GB`, and `12 files` without a total."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if not unit:
            return Text("")
        numbers = [number for number in (task.completed, task.total) if number is not None]
        if unit == BYTES:
            return Text("/".join(decimal(int(number)) for number in numbers))
        return Text(f"{'/'.join(f'{int(number):,}' for number in numbers)} {unit}")
