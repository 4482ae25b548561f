"""A server's listening socket, its URL, and the ready file."""

import json
import os
import socket
import tempfile
from pathlib import Path

from osworld_pipeline.errors import DependencyError
from osworld_pipeline.programs.addresses import ready_message, url_at


def listen_on(host: str, port: int) -> socket.socket:
    """A bound socket; `port` 0 takes any free one.

    Raises:
        OSError, OverflowError: the port is in use, not permitted, or invalid.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is set because asyncio disables Nagle's delay (40 ms per answer) only for sockets that set it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(host: str, listener: socket.socket, *, scheme: str = "http") -> str:
    return url_at(host, listener.getsockname()[1], scheme=scheme)


def write_ready_file(path: Path, url: str) -> None:
    """Written atomically, for programs that wait for the file. Raises DependencyError if it cannot be written."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w") as file:
            json.dump(ready_message(url), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DependencyError(
            f"cannot write the ready file {path} ({error}); free some space, or name another"
        ) from error
