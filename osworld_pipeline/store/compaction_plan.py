"""Selects the input of a compaction: small parts, and compacted files, which are merged like the levels of a
log-structured merge tree. So the number of files stays small and each row is rewritten only a few times."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import floor, log
from pathlib import Path

from osworld_pipeline.store.part_files import COMPACTED, PartFile

FAN_IN = 8
"""Number of files of a level that become one of a higher level."""
LEVEL_BYTES = 1 << 20
"""Smaller files are of level 0; each further level is FAN_IN times as large."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An input of compaction: a small part, or an earlier compacted file."""

    head: Path
    details: Mapping[str, Path]
    """Files of details by table."""
    part: PartFile | None
    num_bytes: int

    @property
    def retires(self) -> str:
        table = self.head.parent
        return (
            f"{table.parent.name}/{COMPACTED}/{self.head.name}"
            if self.part is None
            else f"{table.name}/{self.head.name}"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    small: tuple[Unit, ...] = ()
    merged: tuple[Unit, ...] = ()
    """Compacted files that are rewritten."""


def choose_all(
    small: Sequence[Unit], compacted: Sequence[Unit], stale: Set[str], *, min_parts: int, target_bytes: int
) -> Choice:
    """Selects all small parts, the compacted files below half the target size, and those in `stale`; none if there are
    fewer than `min_parts` small parts and `stale` is empty. `stale`: names of compacted files with rows that small
    parts replace."""
    if len(small) < max(1, min_parts) and not stale:
        return Choice()
    merged = (unit for unit in compacted if unit.head.name in stale or unit.num_bytes < target_bytes // 2)
    return Choice(small=tuple(small), merged=tuple(merged))


def choose_some(
    small: Sequence[Unit],
    compacted: Sequence[Unit],
    replaces: Mapping[str, Set[str]],
    *,
    min_parts: int,
    target_bytes: int,
    budget_bytes: int,
) -> Choice:
    """Selects as many small parts as fit (none if these are fewer than `min_parts`), and full levels of compacted
    files. `replaces`: by part, the compacted files with older rows of it, which must be merged together with the
    part."""
    by_name = {unit.head.name: unit for unit in compacted}
    taken: list[Unit] = []
    merged: dict[str, Unit] = {}
    num_bytes = 0
    # Parts without older rows first: they cost only their own bytes.
    for unit in sorted(small, key=lambda unit: bool(unit.part and replaces.get(unit.part.part))):
        needed = replaces.get(unit.part.part, frozenset[str]()) - merged.keys() if unit.part else ()
        cost = unit.num_bytes + sum(by_name[name].num_bytes for name in needed)
        if taken and num_bytes + cost > budget_bytes:
            continue
        taken.append(unit)
        merged |= {name: by_name[name] for name in needed}
        num_bytes += cost
    if len(taken) < max(1, min_parts):
        taken, merged, num_bytes = [], {}, 0
    for level, files in sorted(_levels(compacted, target_bytes).items()):
        left = [unit for unit in files if unit.head.name not in merged]
        has_more = bool(taken or merged) and level_of(num_bytes) <= level
        if len(left) + has_more < FAN_IN:
            continue
        for unit in left:
            if num_bytes + unit.num_bytes <= budget_bytes:
                merged[unit.head.name] = unit
                num_bytes += unit.num_bytes
    if not taken and len(merged) < 2:
        return Choice()
    return Choice(small=tuple(taken), merged=tuple(merged.values()))


def choose_where(
    small: Sequence[Unit],
    compacted: Sequence[Unit],
    replaces: Mapping[str, Set[str]],
    *,
    is_due: Callable[[Unit], bool],
) -> Choice:
    """Selects the units that are due, of any size, and what must be merged together with them (`choose_some`)."""
    taken = [unit for unit in small if is_due(unit)]
    needed = frozenset[str]().union(*(replaces.get(unit.part.part, frozenset()) for unit in taken if unit.part))
    merged = (unit for unit in compacted if unit.head.name in needed or is_due(unit))
    return Choice(small=tuple(taken), merged=tuple(merged))


def level_of(num_bytes: int) -> int:
    return 0 if num_bytes < LEVEL_BYTES else 1 + floor(log(num_bytes / LEVEL_BYTES, FAN_IN))


def _levels(compacted: Sequence[Unit], target_bytes: int) -> Mapping[int, list[Unit]]:
    """Files below half the target size, by level."""
    levels: dict[int, list[Unit]] = {}
    for unit in compacted:
        if unit.num_bytes < target_bytes // 2:
            levels.setdefault(level_of(unit.num_bytes), []).append(unit)
    return levels


def batches(units: Sequence[Unit], target_bytes: int) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    num_bytes = 0
    for unit in units:
        if batch and num_bytes + unit.num_bytes > target_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(unit)
        num_bytes += unit.num_bytes
    if batch:
        yield batch
