"""The root side of the desktop's sudo: checks the password, caches the success for a while, and runs the command as
root of the sandbox with the caller's folder, environment and open files. Any program of the desktop can connect: a
malformed or incomplete request is dropped without blocking the others."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import time
from typing import Any

from .programs import CAPABILITY_VERSION

PASSWORD = "password"  # noqa: S105 - OSWorld's tasks know it; it protects nothing outside the sandbox
GRACE_S = 15 * 60.0
MAX_MESSAGE_BYTES = 1024 * 1024
RECEIVE_LIMIT_S = 5.0
"""Time limit for receiving a whole request."""
MAX_HALF_SENT = 64
"""Maximum number of requests that are only partly received at a time."""
NUM_FILES = 3
"""File descriptors that come with a command: its standard streams."""
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_DROPPED = (12, 13, 16, 17, 19, 20, 21, 22, 23, 24, 27)
"""NET_ADMIN and NET_RAW; SYS_MODULE, RAWIO, PTRACE, PACCT, ADMIN, BOOT, NICE and RESOURCE; MKNOD: root must not be
able to raise its limits, stop the guest agent, or use kernel interfaces that only root may use."""
_LENGTH = struct.Struct("!I")

_libc = ctypes.CDLL(None, use_errno=True)


class RootHelper:
    """Serves until the desktop ends. Single-threaded, because it forks."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._half_sent: dict[socket.socket, _Request] = {}
        self._callers: dict[int, socket.socket] = {}
        """Running command -> the sudo that waits for it."""
        self._trusted_until = 0.0

    def serve(self) -> None:
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select(timeout=1 if self._half_sent else 30):
                if key.fileobj is wake_read:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Request):
                    self._read_request(key.data)
                else:
                    self._read_caller(key.data)
            self._refuse_late_requests()

    def _reap(self) -> None:
        """Reaps the commands that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            caller = self._callers.pop(pid, None)
            if caller is not None:
                code = os.waitstatus_to_exitcode(status)
                self._finish(caller, {"exit": code if code >= 0 else 128 - code})

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        if len(self._half_sent) >= MAX_HALF_SENT:
            caller.close()
            return
        caller.setblocking(False)
        self._half_sent[caller] = _Request(caller, time.monotonic() + RECEIVE_LIMIT_S)
        self._selector.register(caller, selectors.EVENT_READ, self._half_sent[caller])

    def _read_request(self, request: "_Request") -> None:
        try:
            message = request.receive()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._refuse(request)
            return
        if message is not None:
            self._forget(request)
            request.caller.settimeout(RECEIVE_LIMIT_S)
            try:
                self._handle(request.caller, message, request.files)
            finally:
                request.close_files()

    def _refuse(self, request: "_Request") -> None:
        self._forget(request)
        request.close_files()
        request.caller.close()

    def _forget(self, request: "_Request") -> None:
        del self._half_sent[request.caller]
        self._selector.unregister(request.caller)

    def _refuse_late_requests(self) -> None:
        for request in [one for one in self._half_sent.values() if one.until < time.monotonic()]:
            self._refuse(request)

    def _handle(self, caller: socket.socket, request: dict[str, Any], files: list[int]) -> None:
        kind = request.get("kind")
        if kind == "forget":
            self._trusted_until = 0.0
            return self._reply(caller, {"ok": True})
        if kind == "check":
            if request.get("password") == PASSWORD:
                self._trusted_until = time.monotonic() + GRACE_S
            return self._reply(caller, {"ok": self._is_trusted()})
        if kind != "run" or not self._is_trusted() or len(files) != NUM_FILES:
            return self._reply(caller, {"ok": False})
        try:
            pid = os.fork()
        except OSError as error:  # the desktop's limit of processes
            return self._reply(caller, {"exit": 1, "error": f"sudo: unable to fork: {error.strerror}"})
        if pid == 0:
            self._become_command(request, files)
        if request.get("background"):
            return self._reply(caller, {"ok": True})
        self._callers[pid] = caller
        caller.settimeout(None)
        self._selector.register(caller, selectors.EVENT_READ, pid)
        return None

    def _is_trusted(self) -> bool:
        return time.monotonic() < self._trusted_until

    def _read_caller(self, pid: int) -> None:
        """The waiting sudo forwards signals, one byte each; if it ends, the command's process group gets SIGHUP."""
        caller = self._callers.get(pid)
        if caller is None:
            return
        try:
            data = caller.recv(64)
        except OSError:
            data = b""
        for number in data or bytes([signal.SIGHUP]):
            with contextlib.suppress(ProcessLookupError, OSError):
                os.killpg(pid, number)
        if not data:
            self._selector.unregister(caller)
            self._callers.pop(pid, None)
            caller.close()

    def _become_command(self, request: dict[str, Any], files: list[int]) -> None:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, file in enumerate([os.dup(file) for file in files]):
                os.dup2(file, target)
            os.closerange(3, 4096)
            os.umask(int(request.get("umask", 0o022)))
            _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
            _drop_capabilities()
            os.chdir(request["cwd"])
            os.execvpe(request["argv"][0], request["argv"], request["env"])  # noqa: S606
        except FileNotFoundError:
            os.write(2, f"sudo: {request['argv'][0]}: command not found\n".encode())
            os._exit(1)
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into the server's loop
            os.write(2, f"sudo: {error}\n".encode())
            os._exit(1)

    def _finish(self, caller: socket.socket, answer: dict[str, Any]) -> None:
        self._selector.unregister(caller)
        self._reply(caller, answer)

    def _reply(self, caller: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            caller.sendall(json.dumps(answer).encode())
        caller.close()


def _drop_capabilities() -> None:
    """Drops _DROPPED for this process and all its children, and clears the inheritable set: an inherited capability
    would outlast the bounding set."""
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    effective_low, permitted_low, _, effective_high, permitted_high, _ = struct.unpack("=6I", data.raw)
    packed = struct.pack("=6I", effective_low, permitted_low, 0, effective_high, permitted_high, 0)
    if _libc.capset(header, packed):
        raise OSError(ctypes.get_errno(), "capset")
    for capability in _DROPPED:
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


class _Request:
    """The received part of a request: a length, and that many bytes of JSON, with descriptors on the first part."""

    def __init__(self, caller: socket.socket, until: float) -> None:
        self.caller = caller
        self.until = until
        self.files: list[int] = []
        self._data = b""

    def close_files(self) -> None:
        for file in self.files:
            os.close(file)

    def receive(self) -> "dict[str, Any] | None":
        """The request once it is complete, None before. ValueError: it is invalid, or cannot become complete."""
        piece, files, _, _ = socket.recv_fds(self.caller, self._num_missing(), NUM_FILES)
        self.files += files
        self._data += piece
        if not piece:
            raise ValueError("the request is incomplete")
        if len(self.files) > NUM_FILES:
            raise ValueError("too many descriptors")
        return None if self._num_missing() else _parse(self._data[_LENGTH.size :])

    def _num_missing(self) -> int:
        """The number of missing bytes; data after the request must not be read yet."""
        if len(self._data) < _LENGTH.size:
            return _LENGTH.size - len(self._data)
        length = _LENGTH.unpack_from(self._data)[0]
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise ValueError("empty or too long")
        return _LENGTH.size + length - len(self._data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        request = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(request, dict):
        raise ValueError("not an object")
    return request
