"""Reads small files of untrusted folders. A path may be a FIFO, which blocks on open until there is a writer, or a
device with endless data."""

import os
import stat
from pathlib import Path

MAX_BYTES = 64 << 20


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """
    Raises:
        OSError: the file is missing, unreadable, not regular, or larger than `max_bytes`. Files of the kernel report
            size 0 and read as empty.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        if about.st_size > max_bytes:
            raise OSError(f"{path.name} is larger than {max_bytes / 2**20:g} MiB")
        data = file.read(about.st_size)
    if data is None or len(data) < about.st_size:
        raise OSError(f"{path.name} became shorter while it was read")
    return data
