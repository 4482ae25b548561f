"""Ends the desktop once its X server is gone or blocked by a program of the desktop, because no screenshot or input is
possible any more. A timeout would look like a fault of the machine."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from Xlib.display import Display
from Xlib.error import DisplayError

from .processes import ENDED_FROM_INSIDE

INTERVAL_S = 1.0
STOPPED_LIMIT_S = 2.0
GRABBED_LIMIT_S = 12.0
"""A grab blocks all other clients. Window managers hold one for milliseconds."""
_STOPPED, _IDLE = b"Tt", b"S"


class XServerWatch:
    def __init__(self, x_server: subprocess.Popen[bytes], display: Display) -> None:
        """`display` is a connection used only by this watch."""
        self._x_server, self._display = x_server, display
        self._asked_at: float | None = None
        """None while no request is open."""

    def start(self) -> None:
        for work in (self._wait, self._ask, self._judge):
            threading.Thread(target=work, daemon=True).start()

    def _wait(self) -> None:
        self._x_server.wait()
        _end("ended")

    def _ask(self) -> None:
        while True:
            self._asked_at = time.monotonic()
            try:
                self._display.sync()
            except (DisplayError, OSError):
                return  # the X server has ended
            self._asked_at = None
            time.sleep(INTERVAL_S)

    def _judge(self) -> None:
        """An idle server that leaves a request unanswered is grabbed; a busy or starved one is not idle."""
        stopped_since = idle_since = None
        while True:
            now, state, asked_at = time.monotonic(), _state(self._x_server.pid), self._asked_at
            stopped_since = (stopped_since or now) if state in _STOPPED else None
            idle_since = (idle_since or now) if state in _IDLE and asked_at is not None else None
            if stopped_since is not None and now - stopped_since >= STOPPED_LIMIT_S:
                _end("was stopped")
            if idle_since is not None and asked_at is not None and now - max(idle_since, asked_at) >= GRABBED_LIMIT_S:
                _end(f"left a request unanswered for {GRABBED_LIMIT_S:g} s while idle: a client has grabbed it")
            time.sleep(INTERVAL_S)


def _state(pid: int) -> bytes:
    """One letter, as in proc(5); `X` for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return b"X"


def _end(how: str) -> None:
    print(f"the X server {how}", file=sys.stderr, flush=True)
    time.sleep(0.05)
    os._exit(ENDED_FROM_INSIDE)
