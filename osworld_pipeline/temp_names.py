"""Names of temporary files, which identify the writer, so that a dead one can be detected.

A process id is only valid in one PID namespace of one running kernel. Containers of one host have the same process ids,
and may have the same host name; so a name also has the kernel's boot id and the namespace. A writer elsewhere is
considered dead only if its file has not changed for a long time.
"""

import hashlib
import os
import re
import socket
import time
from pathlib import Path
from uuid import uuid4

OLD_S = 2 * 86_400.0
"""A file of a writer elsewhere is removed after this time without a change."""
_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "host"
_NAME = re.compile(r"\.(?P<place>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{32}\.(tmp(\.wal|-journal|-wal|-shm)?|export)")
"""Including the files that DuckDB and SQLite keep next to a database."""


def temp_name(suffix: str = "tmp") -> str:
    """A new hidden name of this process."""
    return f".{_HOST}-{_namespace()}.{os.getpid()}.{uuid4().hex}.{suffix}"


def is_stale(path: Path) -> bool:
    """Whether `path` is a temporary file of a dead writer, or of one elsewhere that has been inactive for long."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return False
    namespace = _namespace()
    if namespace and found["place"] == f"{_HOST}-{namespace}":
        return not _is_alive(int(found["pid"]))
    try:
        return path.lstat().st_mtime < time.time() - OLD_S
    except FileNotFoundError:
        return False


def _namespace() -> str:
    """The PID namespace of this process as a short digest; empty if unknown. Read each time, because a child may be in
    another one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # A /proc of another namespace would report that one: the last number of NSpid must be our own process id.
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("NSpid:")]
        if int(line.split()[-1]) != os.getpid():
            return ""
        return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except (OSError, ValueError):
        return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
