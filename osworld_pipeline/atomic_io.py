"""Atomic file writes (temporary file, sync, rename), and locks with a timeout. A killed writer leaves at most a hidden
temporary file, which a later call of `remove_stale_temps` removes."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osworld_pipeline.errors import PipelineError, StoreError
from osworld_pipeline.file_locks import TakenError, lock
from osworld_pipeline.file_system import NO_LOCKS, explain_lock
from osworld_pipeline.temp_names import is_stale, temp_name

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def replacing(path: Path, *, temp_folder: Path | None = None) -> Iterator[Path]:
    """Yields a temporary path to fill; at the end it is synced and renamed to `path`, or removed after a failure.

    `temp_folder` is on the same file system; None: the folder of `path`.

    Raises:
        StoreError: the file system refused (no space, no permission); the message names the path and the remedy.
    """
    temp = (temp_folder or path.parent) / temp_name()
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temp.parent.mkdir(parents=True, exist_ok=True)
            yield temp
            sync_path(temp)
            os.replace(temp, path)
            sync_path(path.parent)
        except OSError as error:
            raise StoreError(explain_refusal(path, error)) from error
    finally:
        with suppress(OSError):
            temp.unlink()


def write_file(path: Path, data: bytes, *, temp_folder: Path | None = None) -> None:
    """Writes `data` to `path` atomically. Raises StoreError."""
    with replacing(path, temp_folder=temp_folder) as temp:
        temp.write_bytes(data)


def parquet_bytes(table: "pa.Table", *, statistics: Sequence[str] | None = None) -> bytes:
    """A Parquet file without Arrow's copy of the schema, which is most of a small file; the schema's own metadata is
    kept.

    `statistics` names the columns whose minimum and maximum are in the footer; None: all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    wanted: Any = True if statistics is None else list(statistics)
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", store_schema=False, write_statistics=wanted
    ) as writer:
        writer.write_table(table)
        if table.schema.metadata:
            writer.add_key_value_metadata(table.schema.metadata)
    return sink.getvalue().to_pybytes()


def write_parquet(
    path: Path, table: "pa.Table", *, temp_folder: Path | None = None, statistics: Sequence[str] | None = None
) -> None:
    """Writes one table as one Parquet file, atomically. Raises StoreError.

    The file is built in memory, so that Python's own write reports a full disk with its errno.
    """
    write_file(path, parquet_bytes(table, statistics=statistics), temp_folder=temp_folder)


def remove_stale_temps(folder: Path) -> int:
    """Removes the temporary files of killed writers in `folder`, not those of running ones."""
    removed = 0
    for path in folder.glob(".*.tmp*"):
        if is_stale(path):
            with suppress(OSError):  # read-only, or in use on NFS: a later writer removes it
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                removed += 1
    return removed


@contextmanager
def locked(
    path: Path, *, timeout_s: float, error: type[PipelineError], what: str, is_shared: bool = False
) -> Iterator[None]:
    """Holds an exclusive or a shared lock on `path`, which ends with this process (`file_locks`).

    Raises:
        PipelineError: of class `error`, when another process holds it for longer than `timeout_s`; the message has its
            pid.
        StoreError: the file system refused the lock, or has no locks.
    """
    try:
        held = lock(path, timeout_s=timeout_s, is_shared=is_shared)
    except TakenError as taken:
        raise error(
            f"{what} has been locked by process {taken.holder} for more than {timeout_s:g} s ({path}): "
            "wait for it or stop it, then try again"
        ) from None
    except OSError as failure:
        explain = explain_lock if failure.errno in NO_LOCKS else explain_refusal
        raise StoreError(explain(path, failure)) from failure
    with held:
        yield


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain_refusal(path: Path, error: OSError) -> str:
    """One sentence: what could not be written, and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no disk space left to write {path}: free some space there and run again; no partial file remains"
    if error.errno == errno.EROFS:
        return f"the file system of {path} is read-only: choose a folder that can be written"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to write {path}: make the folder writable for this user, or choose another folder"
    return f"cannot write {path}: {error.strerror or error}; fix that and run again; no partial file remains"
