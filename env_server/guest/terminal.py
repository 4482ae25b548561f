"""The text an xterm shows. xterm does not support AT-SPI, but prints its screen into a file on a client message."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import errno
import os
import stat
import threading
import time
from pathlib import Path

from Xlib import X
from Xlib.display import Display
from Xlib.error import XError
from Xlib.protocol.event import ClientMessage

from .windows import WindowManager

PRINT_LIMIT_S = 2.0
MAX_BYTES = 256 * 1024
NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
"""Errors of opening or removing a path that does not hold a file of ours."""
PRINT_MESSAGE = "DESKTOP_PRINT_TERMINAL"


def terminal_resources(runtime: Path) -> str:
    """The X resources that make every xterm handle `PRINT_MESSAGE`. The file appears atomically, by a rename."""
    folder = str(runtime)
    return (
        "XTerm*printAttributes: 0\n"
        "XTerm*printerAutoClose: true\n"
        f"XTerm*printerCommand: cat > {folder}/terminal.new; mv {folder}/terminal.new {folder}/terminal.txt\n"
        f"XTerm*vt100.translations: #override <Message>{PRINT_MESSAGE}: print()\n"
    )


class TerminalReader:
    def __init__(self, display: Display, manager: WindowManager, runtime: Path) -> None:
        self._display, self._manager = display, manager
        self._file = runtime / "terminal.txt"
        self._lock = threading.Lock()

    def text(self) -> str | None:
        """Text of the active xterm, else of the topmost one; None if there is none or it does not answer."""
        with self._lock:
            return self._text()

    def _text(self) -> str | None:
        terminals = [w.window_id for w in self._manager.windows() if w.classes[1] == "XTerm"]
        if not terminals:
            return None
        active = self._manager.active_window_id()
        _remove(self._file)
        try:
            self._ask(active if active in terminals else terminals[-1])
        except XError:
            return None  # the window was closed meanwhile
        until = time.monotonic() + PRINT_LIMIT_S
        while time.monotonic() < until:
            printed = _read(self._file)
            if printed is not None:
                lines = printed.decode("utf-8", "replace").replace("\f", "").splitlines()
                return "\n".join(line.rstrip() for line in lines).rstrip()
            time.sleep(0.003)
        return None

    def _ask(self, window_id: int) -> None:
        window = self._display.create_resource_object("window", window_id)
        kind = self._display.intern_atom(PRINT_MESSAGE)
        for child in window.query_tree().children:
            child.send_event(ClientMessage(window=child, client_type=kind, data=(32, [X.NONE] * 5)), event_mask=0)
        self._display.sync()


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in NO_FILE:
            raise


def _read(path: Path) -> bytes | None:
    """None if there is no file. Any program of the desktop may replace it with something else at any moment."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    try:
        return os.read(file, MAX_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    finally:
        os.close(file)
