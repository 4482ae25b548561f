"""Figures with their spread, the printing of tables, and the description of the machine."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Several sorted values of one figure."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = tuple(sorted(values))
        if not found:
            raise ValueError("a spread needs at least one value")
        return cls(values=found)

    def quantile(self, share: float) -> float:
        """Linear interpolation between the two nearest values."""
        place = share * (len(self.values) - 1)
        low = int(place)
        high = min(low + 1, len(self.values) - 1)
        return self.values[low] + (self.values[high] - self.values[low]) * (place - low)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def range_text(self, digits: int = 1) -> str:
        """`median (min-max)`, for a few rounds."""
        if len(self.values) == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.values[0]:.{digits}f}-{self.values[-1]:.{digits}f})"

    def quartile_text(self, digits: int = 1) -> str:
        """`p50 [p25..p75]`, for many values."""
        return f"{self.median:.{digits}f} [{self.quantile(0.25):.{digits}f}..{self.quantile(0.75):.{digits}f}]"

    def fields(self) -> dict[str, float | int]:
        """The fields in a JSON file."""
        names = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
        return {"n": len(self.values), **{name: round(self.quantile(share), 4) for name, share in names.items()}}


def verdict(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]not met[/]"


def timed_ms(ask: Callable[[], object], count: int) -> Spread:
    """Wall times of `count` calls, in milliseconds."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        ask()
        times.append((time.perf_counter() - start) * 1e3)
    return Spread.of(times)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def machine() -> dict[str, str | int | float]:
    """Facts of this machine that the figures depend on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def show_machine(console: Console) -> dict[str, str | int | float]:
    """Print the facts of this machine, and return them."""
    about = machine()
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()))
    return about
