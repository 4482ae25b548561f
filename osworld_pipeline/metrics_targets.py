"""The addresses of processes that serve metrics, as files for Prometheus' `file_sd_configs`: many processes share a
host, at free ports. The file of a killed process is removed when the next one starts."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from osworld_pipeline.atomic_io import explain_refusal, remove_stale_temps, write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import TakenError, lock


@contextmanager
def metrics_target(folder: Path, name: str, target: str, labels: Mapping[str, str]) -> Iterator[Path]:
    """Keeps the file of this process until the block ends. `name`: what it runs; `target`: HOST:PORT; `labels`: of all
    its metrics.

    Raises:
        StoreError: the file cannot be written.
    """
    path = folder / f"{name}-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}.json"
    remove_stale_targets(folder)
    try:
        held = lock(_lock_of(path))
    except OSError as error:
        raise StoreError(explain_refusal(path, error)) from error
    try:
        write_file(path, json.dumps([{"targets": [target], "labels": dict(labels)}]).encode())
        yield path
    finally:
        with suppress(OSError):  # the next process removes it
            path.unlink(missing_ok=True)
        held.release(remove=True)


def remove_stale_targets(folder: Path) -> None:
    """Removes the files of dead processes."""
    remove_stale_temps(folder)
    for path in {one.with_suffix(".json") for pattern in ("*.json", "*.lock") for one in folder.glob(pattern)}:
        with suppress(TakenError, OSError, StoreError):  # alive; or removed by another process meanwhile
            held = lock(_lock_of(path))
            path.unlink(missing_ok=True)
            held.release(remove=True)


def _lock_of(target: Path) -> Path:
    """Held while its process runs."""
    return target.with_suffix(".lock")
