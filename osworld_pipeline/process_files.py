"""Files that a process keeps while it runs, so that other processes of the same state find it: the address of its
metrics, or of its env server. The file of a killed process is removed when the next process starts."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from osworld_pipeline.atomic_io import explain_refusal, remove_stale_temps, replacing
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import TakenError, lock


@contextmanager
def process_file(folder: Path, name: str, data: bytes, *, mode: int = 0o644) -> Iterator[Path]:
    """Keeps the file of this process until the block ends. `name`: what it runs; `mode`: who may read the file.

    Raises:
        StoreError: the file cannot be written.
    """
    path = folder / f"{name}-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}.json"
    remove_stale_files(folder)
    try:
        held = lock(_lock_of(path))
    except OSError as error:
        raise StoreError(explain_refusal(path, error)) from error
    try:
        with replacing(path) as temp:
            temp.touch(mode)
            temp.write_bytes(data)
        yield path
    finally:
        with suppress(OSError):  # the next process removes it
            path.unlink(missing_ok=True)
        with suppress(StoreError):  # another process took this one for dead, and removed its file
            held.release(remove=True)


def metrics_target(folder: Path, name: str, target: str, labels: Mapping[str, str]) -> AbstractContextManager[Path]:
    """A file for Prometheus' `file_sd_configs`: many processes share a host, at free ports. `target`: HOST:PORT;
    `labels`: of all its metrics."""
    return process_file(folder, name, json.dumps([{"targets": [target], "labels": dict(labels)}]).encode())


def files_of_this_host(folder: Path) -> list[Path]:
    """The files of processes that run on this host. Reads only."""
    return [path for path in sorted(folder.glob(f"*-{socket.gethostname()}-*.json")) if _is_running(path)]


def remove_stale_files(folder: Path) -> None:
    """Removes the files of dead processes."""
    remove_stale_temps(folder)
    for path in {one.with_suffix(".json") for pattern in ("*.json", "*.lock") for one in folder.glob(pattern)}:
        with suppress(TakenError, OSError, StoreError):  # alive; or removed by another process meanwhile
            held = lock(_lock_of(path))
            path.unlink(missing_ok=True)
            held.release(remove=True)


def _is_running(path: Path) -> bool:
    process_id = path.stem.split("-")[-2]
    return process_id.isdigit() and Path("/proc", process_id).exists()


def _lock_of(path: Path) -> Path:
    """Held while its process runs."""
    return path.with_suffix(".lock")
