"""Progress of long work: library code reports it to a callback, and a command shows it."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

BYTES = "bytes"
"""The unit of sizes."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of one kind of work is done. A command may do several kinds in turn."""

    what: str
    done: int = 0
    total: int = 0
    """0: not known."""
    unit: str = ""
    """What is counted: BYTES, or a plural."""


OnProgress = Callable[[Progress], None]


class Tally:
    """Reports the work that is done so far; reports nothing if the total is 0. Safe for several threads."""

    def __init__(self, on_progress: OnProgress | None, what: str, total: int, unit: str) -> None:
        self._on_progress = on_progress
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, number: int) -> None:
        """The sum is limited to the total, because a file may have grown since it was counted."""
        if self._on_progress is None or not self._total:
            return
        with self._lock:
            self._done = min(self._done + number, self._total)
            self._on_progress(Progress(self._what, self._done, self._total, self._unit))


def tracked(items: Collection[Item], on_progress: OnProgress | None, what: str, unit: str) -> Iterator[Item]:
    """Yields the items, and reports each when the caller takes the next one."""
    tally = Tally(on_progress, what, len(items), unit)
    for item in items:
        yield item
        tally.add(1)


def counted(items: Iterable[Item], on_progress: OnProgress | None, what: str, unit: str) -> Iterator[Item]:
    """Like `tracked`, for a number of items that is not known before the last one."""
    number = 0
    for number, item in enumerate(items, start=1):
        yield item
        if on_progress is not None:
            on_progress(Progress(what, number, 0, unit))
    if on_progress is not None:
        on_progress(Progress(what, number, number, unit))


def begin(on_progress: OnProgress | None, what: str) -> None:
    """Reports work that has no parts to count."""
    if on_progress is not None:
        on_progress(Progress(what))
