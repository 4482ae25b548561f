"""Merges small indexes of packs into larger ones, like compaction of parts: a look-up reads few indexes for any number
of packs, and each record is rewritten only a few times."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex

import numpy as np

from osworld_pipeline.store.compaction_plan import FAN_IN, level_of
from osworld_pipeline.store.pack_index import CHUNK, RECORD, SUFFIX, PackIndex, sort_keys, write_index
from osworld_pipeline.store.packs import Packs

_GONE = np.uint32(0xFFFFFFFF)


def merge_indexes(packs: Packs, *, temp_folder: Path, budget_bytes: int | None = None) -> int:
    """Merges the indexes of each full level, and rewrites an index if more than half of its packs are gone; returns how
    many indexes were replaced. The caller holds the upkeep lock.

    Raises:
        StoreError: an index is damaged, or the file system refused.
    """
    _remove_replaced(packs)
    here = packs.here()
    num_merged = 0
    while chosen := _choose(packs.indexes(), here, budget_bytes):
        for index in chosen:
            index.check()
        names = sorted({name for index in chosen for name in index.packs if name in here})
        path = packs.index_root / f"{time.time_ns() // 1_000_000:012x}-{token_hex(4)}{SUFFIX}"
        if names:
            replaces = [index.name for index in chosen]
            write_index(path, names, _merged(chosen, names), temp_folder=temp_folder, replaces=replaces)
        for index in chosen:
            index.path.unlink(missing_ok=True)
        num_merged += len(chosen)
    return num_merged


def _remove_replaced(packs: Packs) -> None:
    """Removes the indexes that a killed merge left."""
    for name in {name for index in packs.indexes() for name in index.replaces}:
        (packs.index_root / name).unlink(missing_ok=True)


def _choose(indexes: Sequence[PackIndex], here: frozenset[str], budget_bytes: int | None) -> list[PackIndex]:
    for index in indexes:
        num_gone = sum(name not in here for name in index.packs)
        if 2 * num_gone > len(index.packs):
            return [index]
    levels: dict[int, list[PackIndex]] = defaultdict(list)
    for index in indexes:
        levels[level_of(index.num_bytes)].append(index)
    for _, files in sorted(levels.items()):
        if len(files) >= FAN_IN and (budget_bytes is None or sum(index.num_bytes for index in files) <= budget_bytes):
            return files
    return []


def _merged(indexes: Sequence[PackIndex], names: Sequence[str]) -> Iterator[np.ndarray]:
    """The records of the packs `names` in order, a range of digests at a time."""
    places = {name: place for place, name in enumerate(names)}
    numbers = [np.array([places.get(name, _GONE) for name in index.packs], np.uint32) for index in indexes]
    num_ranges = 1 + sum(index.num_records for index in indexes) // CHUNK
    starts = [0] * len(indexes)
    for number in range(1, num_ranges + 1):
        bound = ((number << 64) // num_ranges).to_bytes(8, "big") + bytes(24) if number < num_ranges else None
        taken: list[np.ndarray] = []
        for place, index in enumerate(indexes):
            end = index.num_records if bound is None else index.first_from(bound)
            records = index.records(starts[place], end)
            records["pack"] = numbers[place][records["pack"]]
            taken.append(records[records["pack"] != _GONE])
            starts[place] = end
        whole = np.concatenate([np.zeros(0, RECORD), *taken])
        whole = whole[np.lexsort((whole["pack"], sort_keys(whole)))]
        # A pack that was indexed twice is in two indexes.
        is_new = np.ones(len(whole), bool)
        is_new[1:] = (sort_keys(whole)[1:] != sort_keys(whole)[:-1]) | (whole["pack"][1:] != whole["pack"][:-1])
        yield whole[is_new]
