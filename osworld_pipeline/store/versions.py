"""Versions of parts: milliseconds since 1970, shifted by VERSION_SHIFT bits (a compaction writes its generation into
the lower bits), and above the versions in the store, so that the last write wins although hosts' clocks differ."""

import threading
import time
from pathlib import Path

from osworld_pipeline.store.footers import read_footer
from osworld_pipeline.store.part_files import COMPACTED, SEED, VERSION_SHIFT, PartFile, list_names

NUM_CHEAP = 1000
"""A folder with fewer files is listed before every write, which takes about a millisecond."""
LISTING_SHARE = 0.05
"""Share of a program's time for listings of larger folders. Where hundreds of desktops finish episodes, replaced files
stay until their readers are done, and listing them before every write would cost more than the writes."""

_lock = threading.Lock()
_last_ms = 0
_listed: dict[Path, tuple[int, float]] = {}
"""The newest version of the last listing and the time (monotonic) until which it is used, by folder."""


def next_version(root: Path, head: str) -> int:
    """A version that `head` has not used yet, except by a host whose clock is ahead and which wrote after the last
    listing of a large folder (`LISTING_SHARE`).

    Raises:
        StoreError: a compacted file is damaged.
    """
    global _last_ms
    seen = _seen_ms(root, head)
    with _lock:
        _last_ms = max(time.time_ns() // 1_000_000, _last_ms + 1, seen + 1)
        return _last_ms << VERSION_SHIFT


def _seen_ms(root: Path, head: str) -> int:
    folder, started = root / head, time.monotonic()
    newest, used_until = _listed.get(folder, (0, 0.0))
    if started < used_until:
        return newest
    versions = _versions(root, head)
    newest, took_s = max(versions, default=0) >> VERSION_SHIFT, time.monotonic() - started
    _listed[folder] = (newest, started + took_s / LISTING_SHARE if len(versions) >= NUM_CHEAP else 0.0)
    return newest


def _versions(root: Path, head: str) -> list[int]:
    """The newest version of each file of the table."""
    # Compacted files first: small files that are compacted meanwhile are still listed after that.
    folder = root / head / COMPACTED
    versions = [_newest_of(folder / name) for name in list_names(folder) if name != SEED]
    versions += [file.version for file in map(PartFile.parse, list_names(root / head)) if file]
    return versions


def _newest_of(path: Path) -> int:
    """The newest version in a compacted file, from its footer."""
    try:
        return read_footer(path).largest("part_version") or 0
    except FileNotFoundError:
        return 0  # removed since it was listed: its replacement is as new
