"""Builds of the union: its tables and statistics are in one folder, and a small file names the current folder. A reader
that reads that file once gets tables of one build. A replaced build is kept for a day for running readers.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import orjson

from osworld_pipeline.atomic_io import explain_refusal, remove_stale_temps, sync_path, write_file
from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TableError
from osworld_pipeline.temp_names import temp_name

UNION_TABLES = ("union_tasks", "replay_buffer", "train_tasks", "rejects", "raw_counts")
STATS_FILE = "osworld_train_stats.json"
CURRENT = "union.json"
REPLACED_GRACE_S = 86_400.0
_BUILD = re.compile(r"union-[0-9a-f]{16}")
_pinned: ContextVar[tuple[Path, Path | None] | None] = ContextVar("pinned_build", default=None)
"""The state's root, and the build that `one_build` keeps for it."""


def table_paths(state: StateDir) -> Mapping[str, Path]:
    """The file of each small table; those of the union are of one build. A file may be absent.

    Raises:
        TableError: as current_build.
    """
    pinned = _pinned.get()
    build = pinned[1] if pinned is not None and pinned[0] == state.root else current_build(state)
    union = build or state.tables
    return {name: (union if name in UNION_TABLES else state.tables) / f"{name}.parquet" for name in OWNED_TABLES}


@contextmanager
def one_build(state: StateDir) -> Iterator[None]:
    """Reads every table of the union, in this block, from the build that was current at its start. A block within a
    block keeps the outer build.

    Raises:
        TableError: as current_build.
    """
    pinned = _pinned.get()
    if pinned is not None and pinned[0] == state.root:
        yield
        return
    token = _pinned.set((state.root, current_build(state)))
    try:
        yield
    finally:
        _pinned.reset(token)


def current_build(state: StateDir) -> Path | None:
    """The folder of the current build; None before the first, when the tables are files in `tables/` itself.

    Raises:
        TableError: the note that names it is damaged, or the folder is missing.
    """
    path = state.tables / CURRENT
    way_out = "restore it from a copy, or remove it and run the union again"
    try:
        name = orjson.loads(path.read_bytes())["build"]
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise TableError(f"{path} is damaged ({error}): {way_out}") from error
    if not isinstance(name, str) or not _BUILD.fullmatch(name):
        raise TableError(f"{path} is damaged (it names no build): {way_out}")
    if not (state.tables / name).is_dir():
        raise TableError(
            f"{state.tables / name} is missing, and {path} names it: restore the folder from a copy, or remove {path} "
            "and run the union again"
        )
    return state.tables / name


@contextmanager
def new_build(state: StateDir) -> Iterator[Path]:
    """Yields a folder to fill; at the end it becomes the current build, or it is removed after a failure.

    Raises:
        TableError: as current_build.
        StoreError: the file system refused.
    """
    temp = state.tables / temp_name()
    build = state.tables / f"union-{secrets.token_hex(8)}"
    try:
        try:
            remove_stale_temps(state.tables)
            remove_replaced_builds(state)
            temp.mkdir(parents=True)
            yield temp
            for path in (*temp.iterdir(), temp):
                sync_path(path)
            before = current_build(state)
            if before is not None:
                os.utime(before)  # its grace period starts now
            temp.rename(build)
            sync_path(state.tables)
        except OSError as error:
            raise StoreError(explain_refusal(build, error)) from error
        write_file(state.tables / CURRENT, orjson.dumps({"build": build.name}))
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def remove_replaced_builds(state: StateDir, *, grace_s: float = REPLACED_GRACE_S) -> int:
    """Removes builds that were replaced at least `grace_s` ago, and tables from before builds; returns how many.

    Raises:
        TableError: as current_build.
    """
    current = current_build(state)
    if current is None:
        return 0
    builds = [path for path in state.tables.glob("union-*") if _BUILD.fullmatch(path.name) and path != current]
    plain = [state.tables / name for name in (*(f"{table}.parquet" for table in UNION_TABLES), STATS_FILE)]
    due = [path for path in (*builds, *plain) if _is_older(path, grace_s)]
    for path in due:
        with suppress(OSError):  # another process removes it, or NFS keeps it: a later build removes it
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return sum(not path.exists() for path in due)


def _is_older(path: Path, age_s: float) -> bool:
    try:
        return path.stat().st_mtime < time.time() - age_s
    except FileNotFoundError:
        return False
