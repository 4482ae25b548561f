"""Runs in the graders' sandbox: loads desktop-env once and forks a grader for each connection that it receives. A
grader is process 1 of its own namespaces. Its supervisor, which runs no code of desktop-env, kills it when the env
server closes the connection or when it exceeds its memory limit, and reports how it ended."""

import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from seccomp import install_filter  # pyright: ignore[reportMissingImports] - env_server/guest is on the path

from .frames import pack, receive
from .launcher import MODULE
from .namespaces import die_with_parent, drop_capabilities, enter_namespaces, make_private, set_limits
from .processes import below
from .serving import Handlers, answer_call

DOORS = ("guest", "chromium", "vlc")
"""Ports of a grader's loopback, on which the env server accepts connections."""
WATCH_INTERVAL_MS = 250
NUM_LOOKS = 3
FOLDER = "/tmp/grading"  # noqa: S108 - in a separate file system
Options = dict[str, Any]


def main() -> None:
    """Arguments: the control socket's descriptor, options as JSON."""
    control, options = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path += options["search_path"]
    importlib.import_module(MODULE)
    importlib.import_module(".grading", __package__)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the kernel
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            _fork(control, descriptor, options)


def try_out() -> None:
    """Argument: options as JSON. Runs a grader that does nothing; the exit status is not 0 if this machine forbids
    one."""
    options = json.loads(sys.argv[1])
    enter_namespaces()
    pid = os.fork()
    if pid == 0:
        _leave_unless(lambda: _settle_in(options))
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit(1)


def _fork(control: socket.socket, descriptor: int, options: Options) -> None:
    try:
        pid = os.fork()
    except OSError:
        traceback.print_exc()
        pid = -1
    if pid != 0:
        os.close(descriptor)  # if the fork failed, the env server sees its connection closed
        return
    control.close()
    _leave_unless(lambda: _supervise(socket.socket(fileno=descriptor), options))


def _leave_unless(work: Any) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _supervise(connection: socket.socket, options: Options) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    enter_namespaces()
    grader = os.fork()
    if grader == 0:
        _leave_unless(lambda: _grade(connection, options))
    is_excess = _watch(connection, grader, options["memory_bytes"])
    _, raw_status, usage = os.wait4(grader, 0)
    status, took_s = os.waitstatus_to_exitcode(raw_status), usage.ru_utime + usage.ru_stime
    if is_excess:
        end = "memory"
    elif status == -signal.SIGKILL and took_s > 0.5 * options["cpu_s"]:
        # The kernel counts the limit in ticks, but measures `took_s` exactly: on a busy machine they differ.
        end = "cpu"
    else:
        end = f"status {status}"
    try:
        connection.sendall(pack({"end": end}))
    except OSError:
        return  # the env server has closed the connection


def _watch(connection: socket.socket, grader: int, memory_bytes: int) -> bool:
    """Returns when the grader has ended or is killed: True if it exceeded its memory limit."""
    process = os.pidfd_open(grader)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(WATCH_INTERVAL_MS)}
        if process in ready:
            return False
        is_excess = not ready and _exceeds({grader} | below(grader), memory_bytes)
        if ready or is_excess:
            # If process 1 ends, the kernel kills every process of its namespace.
            signal.pidfd_send_signal(process, signal.SIGKILL)
            return is_excess


def _exceeds(pids: set[int], memory_bytes: int) -> bool:
    """Whether these processes together use more than `memory_bytes`. Pages that forked processes share count once; this
    takes longer to measure, and is measured only if the sum of their resident memory exceeds the limit."""
    resident = sum(map(_resident_kib, pids))
    if resident * 1024 <= memory_bytes:
        return False
    # Pages of a process that ends during a measurement can count twice: in its own share, and in the shares that are
    # read later. This rarely happens in every one of several measurements, so the lowest sum counts.
    return min(sum(map(_share_kib, pids)) for _ in range(NUM_LOOKS)) * 1024 > memory_bytes


def _resident_kib(pid: int) -> int:
    """0 if the process has ended."""
    return _kib_of(pid, "status", "RssAnon:", "RssShmem:") or 0


def _share_kib(pid: int) -> int:
    """The proportional set size (PSS); the resident memory if the PSS cannot be read."""
    share = _kib_of(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
    return _resident_kib(pid) if share is None else share


def _kib_of(pid: int, file: str, *names: str) -> int | None:
    """The sum of these lines of /proc/PID/FILE; None if it cannot be read or has none of them."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith(names)]
    return sum(found) if found else None


def _settle_in(options: Options) -> None:
    die_with_parent()
    make_private(options["kept"], disk_bytes=options["disk_bytes"])
    drop_capabilities()
    limits = {key: options[key] for key in ("memory_bytes", "cpu_s", "num_processes", "disk_bytes")}
    set_limits(**limits)
    install_filter()


def _grade(connection: socket.socket, options: Options) -> None:
    _settle_in(options)
    random.seed()
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in DOORS]
    socket.send_fds(connection, [b"d"], [door.fileno() for door in doors])
    for door in doors:
        door.close()
    os.mkdir(FOLDER)
    handlers = Handlers(Path(FOLDER))
    while True:
        try:
            fields, blob = receive(connection)
        except EOFError:
            return
        connection.sendall(pack({"id": fields["id"], **answer_call(handlers, fields, blob)[0]}))
