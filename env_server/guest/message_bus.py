"""Detects whether programs of the desktop have disabled its message buses or the program that reads the accessibility
tree. Only programs of the desktop can end or stop them, so the machine is then not at fault for a missing tree."""

import os
import subprocess
import time
from pathlib import Path

from .processes import descendants

STOPPED_LIMIT_S = 2.0
"""Limit of the total time that services are stopped during one request: programs may stop and continue them in turn."""
ENDED_LIMIT_S = 5.0
"""Time without an answer after which an ended or replaced bus counts as disabled: a replacement may never answer."""
SERVICES = (b"dbus-daemon", b"at-spi-bus-laun", b"at-spi2-registr")
"""The names that the kernel uses, cut to 15 characters."""
_STOPPED = b"Tt"


class DisabledError(Exception):
    """Programs of the desktop have disabled a service that answers requests."""


class MessageBuses:
    """The session's bus, which the guest agent started, and AT-SPI's bus, which the session's bus started."""

    def __init__(self, session: subprocess.Popen[bytes], socket: Path) -> None:
        self._session, self._socket = session, socket
        self._inode: tuple[int, int] | None = None
        self._known: dict[int, bytes] = {}
        """The services that answered: process -> its start time."""

    def begin(self) -> None:
        """Call it once the session's bus accepts connections."""
        self._inode = _inode(self._socket)

    def remember(self) -> None:
        """Records the services after an answer, when all of them are running."""
        self._known = {pid: _stat(pid)[1] for pid in _services()}

    def ending(self) -> str | None:
        """How one of them was ended or replaced; None if none was."""
        if self._session.poll() is not None:
            return "the message bus was ended"
        if _inode(self._socket) != self._inode:
            return "the socket of the message bus was replaced"
        if any(_stat(pid)[1] != started for pid, started in self._known.items()):
            return "a message bus of the accessibility tree was ended"
        return None

    def stopped(self) -> str | None:
        """The name of a service that is stopped now, or None."""
        return next((_name(pid).decode() for pid in _services() if is_stopped(pid)), None)


class StopWatch:
    """Checks, during one request, whether one of the services or `pid` is stopped, or a bus has ended."""

    def __init__(self, buses: MessageBuses, pid: int) -> None:
        self._buses, self._pid = buses, pid
        self._began = self._looked_at = time.monotonic()
        self._stopped_s = 0.0

    def look(self) -> None:
        """
        Raises:
            DisabledError: one was stopped for STOPPED_LIMIT_S in total, or has ended and there was no answer for
                ENDED_LIMIT_S.
        """
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        ending = self._buses.ending() if now - self._began >= ENDED_LIMIT_S else None
        if ending is not None:
            raise DisabledError(ending)
        name = "the program that reads the accessibility tree" if is_stopped(self._pid) else self._buses.stopped()
        if name is not None:
            self._stopped_s += now - before
            if self._stopped_s >= STOPPED_LIMIT_S:
                raise DisabledError(f"{name} was stopped")


def is_stopped(pid: int) -> bool:
    return _stat(pid)[0] in _STOPPED


def _services() -> list[int]:
    """Processes with those names; a policy that starts others with these names harms only its own episode."""
    return [pid for pid in descendants(os.getppid() or os.getpid()) if _name(pid) in SERVICES]


def _inode(socket: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(socket)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _stat(pid: int) -> tuple[bytes, bytes]:
    """State (one letter) and start time, as in proc(5); `X` and an empty string if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return b"X", b""
    return fields[0], fields[19]


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return b""
