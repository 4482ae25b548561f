"""Imports desktop-env once (seconds, hundreds of megabytes) and forks a worker for each socket that it receives, so
that a further worker takes hundredths of a second and shares that memory."""

import importlib
import os
import random
import signal
import socket
import sys
from contextlib import suppress

from .processes import adopt_orphans, children_of, die_with_parent, kill_below
from .serving import CLOSE_LIMIT_S, serve

MODULE = "desktop_env.desktop_env"
_workers: set[int] = set()


def main() -> None:
    """Arguments: the control socket's descriptor, the parent's process id, and the last folders of the module path."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        die_with_parent(int(sys.argv[2]))
    except ProcessLookupError:
        return
    sys.path += sys.argv[3:]
    importlib.import_module(MODULE)
    adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    signal.signal(signal.SIGALRM, lambda *_: _end_orphans())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            _fork(control, descriptor)


def _fork(control: socket.socket, descriptor: int) -> None:
    launcher = os.getpid()
    worker = os.fork()
    if worker:
        _workers.add(worker)
        os.close(descriptor)
        return
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.setsid()
        control.close()
        adopt_orphans()
        random.seed()
        connection = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        die_with_parent(launcher)
        serve(connection)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            _workers.discard(pid)
    if orphans := children_of(os.getpid()) - _workers:
        # Processes that a killed worker left behind: TERM now, KILL after a limit.
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        signal.alarm(int(CLOSE_LIMIT_S))


def _end_orphans() -> None:
    for pid in children_of(os.getpid()) - _workers:
        kill_below(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
