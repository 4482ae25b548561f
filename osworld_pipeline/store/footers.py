"""Reads column statistics of Parquet footers: minimum and maximum by row group, so that a look-up opens only the files
and row groups that may have the value. Files of the store do not change, so a footer is read once."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.part_files import KEY_OF

NUM_REMEMBERED = 65_536
_COLUMNS = frozenset({*KEY_OF.values(), "part", "part_version"})


@dataclass(frozen=True, kw_only=True)
class Footer:
    num_row_groups: int
    ranges: Mapping[str, tuple[tuple[Any, Any] | None, ...]]
    """The range of each row group, by column; None if the footer has none."""

    def row_groups(self, column: str, values: Sequence[str]) -> list[int]:
        """The row groups that may have one of `values`, which are sorted."""
        ranges = self.ranges.get(column, (None,) * self.num_row_groups)
        return [number for number, found in enumerate(ranges) if found is None or _has_any(found, values)]

    def largest(self, column: str) -> Any:
        """The largest value; None if no row group has statistics."""
        return max((found[1] for found in self.ranges.get(column, ()) if found), default=None)

    def smallest(self, column: str) -> Any:
        return min((found[0] for found in self.ranges.get(column, ()) if found), default=None)


@lru_cache(maxsize=NUM_REMEMBERED)
def read_footer(path: Path) -> Footer:
    """
    Raises:
        FileNotFoundError: it does not exist (any more).
        StoreError: the file is damaged.
    """
    try:
        found = pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}): restore it from a copy") from error
    names = (found.schema.column(index).path for index in range(found.num_columns))
    places = {name: index for index, name in enumerate(names) if name in _COLUMNS}
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    return Footer(
        num_row_groups=len(groups),
        ranges={name: tuple(_range(group.column(place)) for group in groups) for name, place in places.items()},
    )


def _range(chunk: Any) -> tuple[Any, Any] | None:
    stats = chunk.statistics
    return (stats.min, stats.max) if stats is not None and stats.has_min_max else None


def _has_any(found: tuple[Any, Any], values: Sequence[str]) -> bool:
    place = bisect_left(values, found[0])
    return place < len(values) and values[place] <= found[1]
