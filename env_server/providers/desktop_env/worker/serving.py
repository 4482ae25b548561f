"""A worker: answers the calls on its socket, one at a time, until the socket is closed or the worker is stopped. Then
it releases its VM, kills its descendants and removes its folder."""

import os
import shutil
import signal
import socket
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from .fault import Fault
from .frames import pack, receive
from .processes import kill_below

CLOSE_LIMIT_S = 20.0
"""How long releasing a VM may take before the worker exits anyway."""


def serve(connection: socket.socket) -> None:
    folder = Path(tempfile.mkdtemp(prefix="desktop-env-"))
    handlers = Handlers(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The handler itself closes everything: desktop-env has bare excepts that would swallow an exception.
    signal.signal(signal.SIGTERM, lambda *_: _finish(handlers))
    try:
        connection.sendall(pack({"pid": os.getpid(), "folder": str(folder)}))
        while True:
            fields, blob = receive(connection)
            answer, data = answer_call(handlers, fields, blob)
            connection.sendall(pack({"id": fields["id"], **answer}, data))
    except (EOFError, OSError):
        _finish(handlers)


class Handlers:
    """Dispatches calls; the modules that need desktop-env are imported on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._desktop: Any = None

    def __call__(self, name: str, arguments: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        if name == "put":
            path = self.folder / "task" / os.path.basename(arguments["name"])
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(blob)
            return {}, b""
        if name == "grade":
            from .grading import grade

            return {"score": grade(self.folder / "task", **arguments)}, b""
        if self._desktop is None:
            from .desktop import Desktop

            self._desktop = Desktop(self.folder)
        return getattr(self._desktop, f"on_{name}")(**arguments)

    def close(self) -> None:
        if self._desktop is not None:
            self._desktop.close()


def answer_call(handlers: Handlers, fields: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        answer, data = handlers(fields["call"], fields["arguments"], blob)
    except Fault as fault:
        return {"fault": fault.kind, "error": str(fault)}, b""
    except Exception as error:  # noqa: BLE001 - the boundary: every error is reported to the env server
        traceback.print_exc()
        return {"fault": "crash", "error": f"{type(error).__name__}: {error}"[:2000]}, b""
    return {"ok": answer}, data


def _finish(handlers: Handlers) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    timer = threading.Timer(CLOSE_LIMIT_S, _leave, (handlers.folder, 1))
    timer.daemon = True
    timer.start()
    try:
        handlers.close()
    except Exception:  # noqa: BLE001 - it is logged and the worker ends in any case
        traceback.print_exc()
    _leave(handlers.folder, 0)


def _leave(folder: Path, code: int) -> NoReturn:
    kill_below(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)
