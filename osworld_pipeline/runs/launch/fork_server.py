"""Starts programs fast: a process that has imported their dependencies forks for each of them. The imports of torch and
transformers take six seconds of a core; a command with several stages pays for them once.

Both ends are here. A program gets its own standard streams, environment, session and process group, as if it were
started separately. Its parent is the fork server, which ends with the process that started it.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

from osworld_pipeline.programs.short_process import imports_without_collection, run_process
from osworld_pipeline.runs.__main__ import PROGRAMS
from osworld_pipeline.runs.__main__ import main as run_main
from osworld_pipeline.runs.parent import die_with_parent

IMPORTED = (
    *PROGRAMS.values(),
    "dagster_pipes",
    "osworld_pipeline.rollout.engines.transformers",
    "osworld_pipeline.runs.parity.probe",
    "osworld_pipeline.training.sft",
    "osworld_pipeline.training.tiny.model",
    "osworld_pipeline.training.update",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)
"""None of them starts threads on import, so that no other thread runs when the server forks."""
MODULE = "osworld_pipeline.runs.launch.fork_server"
START_TIMEOUT_S = 120.0
MAX_REQUEST_BYTES = 1 << 20
_STREAMS = (0, 1, 2)


class ForkServer:
    """Owns the server process and starts programs in it, one at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: variables that libraries read on import."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Passed on, not read. The GPU check must not initialise CUDA, which would not survive a fork.
                env={**os.environ, **environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self._socket = ours
        self._socket.settimeout(START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, program: str, *, stdin: int, output: int, environment: Mapping[str, str]) -> "ForkedProgram | None":
        """`stdin`, `output`: descriptors; `output` is stdout and stderr. Returns None if the server cannot fork: then
        it has ended, and the caller must start the program separately."""
        request = json.dumps({"program": program, "environment": {**os.environ, **environment}}).encode()
        try:
            socket.send_fds(self._socket, [request], [stdin, output])
            answer, (pidfd, *_), _, _ = socket.recv_fds(self._socket, MAX_REQUEST_BYTES, 1)
            pid = json.loads(answer)["pid"]
        except (OSError, ValueError):
            self.stop()
            return None
        return ForkedProgram(pid, pidfd, self._socket)

    def stop(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ForkedProgram:
    """The part of the interface of `subprocess.Popen` that a launcher needs."""

    def __init__(self, pid: int, pidfd: int, server: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Negative: the signal that ended the process."""
        self._pidfd = pidfd
        self._server = server

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._pidfd)
            self.returncode = self._status()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def _status(self) -> int:
        """The exit status. If the server died too, the program counts as killed."""
        try:
            return int(json.loads(self._server.recv(MAX_REQUEST_BYTES))["status"])
        except (OSError, ValueError):
            return -signal.SIGKILL


class _Keeper:
    current: ClassVar["_Keeper | None"] = None

    def __init__(self, server: ForkServer) -> None:
        self.server: ForkServer | None = server
        """None after a failed start, which is not repeated."""


@contextmanager
def kept_fork_server(environment: Mapping[str, str]) -> Iterator[None]:
    """Within the block, one fork server of this process stays up between programs. It starts now, so that its imports
    overlap with what the caller does before the first program. `environment`: variables that libraries read on import,
    in addition to this process's own."""
    _Keeper.current = keeper = _Keeper(ForkServer(environment))
    try:
        yield
    finally:
        _Keeper.current = None
        if keeper.server is not None:
            keeper.server.stop()


def start_warm(
    program: str, job: Callable[[int], AbstractContextManager[int]], *, output: int, environment: Mapping[str, str]
) -> ForkedProgram | None:
    """Starts a program inside `kept_fork_server`. Returns None outside of it, and if no fork server can run.

    `job`: the program's standard input as a descriptor; receives the pid of the parent. `environment`: additional
    variables.
    """
    keeper = _Keeper.current
    if keeper is None or keeper.server is None:
        return None
    with job(keeper.server.pid) as stdin:
        started = keeper.server.start(program, stdin=stdin, output=output, environment=environment)
    if started is None:
        keeper.server = None
    return started


def main(argv: list[str]) -> int:
    """`argv`: the descriptor of the socket, and the pid of the parent."""
    server = socket.socket(fileno=int(argv[0]))
    die_with_parent(signal.SIGKILL, parent_pid=int(argv[1]))
    with imports_without_collection():
        for module in IMPORTED:
            importlib.import_module(module)
    if sys.modules["torch"].cuda.is_initialized():
        return 1
    gc.freeze()  # a collection would write to shared pages and copy them
    request = _serve(server)
    return 0 if request is None else run_main([request["program"]])


def _serve(server: socket.socket) -> dict[str, Any] | None:
    """Forks until the other end closes. Returns the request in each forked child, None in the server."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, MAX_REQUEST_BYTES, 2)
        if not message:
            return None
        request = json.loads(message)
        is_ready, signal_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            server.close()
            os.close(is_ready)
            _become(request, *descriptors)
            os.close(signal_ready)
            return request
        for descriptor in (signal_ready, *descriptors):
            os.close(descriptor)
        os.read(is_ready, 1)  # the child has its own session now, or has died
        os.close(is_ready)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(server, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        server.send(json.dumps({"status": status}).encode())


def _become(request: Mapping[str, Any], stdin: int, output: int) -> None:
    """Sets up the process as the kernel does for a program that is started separately."""
    os.setsid()
    for stream, descriptor in zip(_STREAMS, (stdin, output, output), strict=True):
        os.dup2(descriptor, stream)
    for descriptor in {stdin, output} - set(_STREAMS):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
