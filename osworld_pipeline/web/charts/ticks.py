"""Ticks of an axis, and the grouping of updates into the points of a plot."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")
LEAST = 1e-300
"""Smaller numbers count as 0: their halves may be 0."""


def nice_ticks(low: float, high: float, *, limit: int = 5, is_whole: bool = False) -> tuple[float, ...]:
    """Round numbers, evenly spaced by 1, 2 or 5 times a power of ten, the outer ones at or beyond `low` and `high`; at
    least two and about `limit`. `is_whole`: whole numbers only.

    Raises:
        ValueError: an end that is not finite.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis from {low} to {high} is not finite")
    if high < low:
        low, high = high, low
    if high - low < 1e-12 * max(1.0, abs(high)):
        is_zero = abs(low) < LEAST
        space = 1.0 if is_whole or is_zero else abs(low) / 2
        low, high = (0.0, 1.0) if is_zero and not is_whole else (low - space, high + space)
    rough = (high - low) / max(1, limit - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if is_whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(
        round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, max(last, first + 1) + 1)
    )


@dataclass(frozen=True)
class Bins:
    """Updates from `first` to `last`; each point of a plot covers `width` of them."""

    first: int
    last: int
    width: int

    @classmethod
    def over(cls, updates: Iterable[int], *, limit: int = 60) -> "Bins":
        """The narrowest bins of which there are at most `limit`.

        Raises:
            ValueError: no update.
        """
        found = list(updates)
        if not found:
            raise ValueError("there is no update")
        first, last = min(found), max(found)
        return cls(first, last, -(-(last - first + 1) // limit))

    def __len__(self) -> int:
        return -(-(self.last - self.first + 1) // self.width)

    def index(self, update: int) -> int:
        return (update - self.first) // self.width

    def centre(self, index: int) -> float:
        start, end = self._ends(index)
        return (start + end) / 2

    def label(self, index: int) -> str:
        start, end = self._ends(index)
        return str(start) if start == end else f"{start} to {end}"

    def gather(self, values: Iterable[tuple[int, Value]]) -> Mapping[int, Sequence[Value]]:
        """The values of (update, value) by bin; empty bins are left out."""
        found: dict[int, list[Value]] = {}
        for update, value in values:
            found.setdefault(self.index(update), []).append(value)
        return found

    @property
    def note(self) -> str:
        """The number of updates of a point; empty if it is one."""
        return "" if self.width == 1 else f"Each point covers {self.width} updates."

    def _ends(self, index: int) -> tuple[int, int]:
        start = self.first + index * self.width
        return start, min(start + self.width - 1, self.last)
