"""The helper behind a desktop's sudo continues to run for any input on its socket."""

import array
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROGRAM = """
import socket, sys
from env_server.guest.root_helper import RootHelper
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print("ready", flush=True)
RootHelper(listener).serve()
"""
ANSWER_LIMIT_S = 4.0
"""Less than the helper waits for a request."""


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    path = tmp_path_factory.mktemp("sudo") / "socket"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, stderr=None)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        yield path, process
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def connect(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(path))  # waits for a place in the listener's queue, as sudo does
    link.settimeout(ANSWER_LIMIT_S)
    return link


def ask(path: Path, message: object) -> object:
    with connect(path) as link:
        data = json.dumps(message).encode()
        link.sendall(struct.pack("!I", len(data)) + data)
        return json.loads(link.recv(4096))


def is_well(path: Path) -> bool:
    return ask(path, {"kind": "check", "password": "no"}) == {"ok": False}


def test_a_caller_that_disconnects_at_once_does_not_affect_other_callers(
    helper: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    path, process = helper
    for _ in range(100):
        connect(path).close()
    assert is_well(path)
    assert process.poll() is None


@pytest.mark.parametrize(
    "said",
    [
        b"\0",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 4) + b"null",
        struct.pack("!I", 2) + b"\xff\xfe",
        struct.pack("!I", 100_000) + b"[" * 100_000,
        struct.pack("!I", 100) + b"{}",
    ],
)
def test_an_invalid_request_gets_no_answer(helper: tuple[Path, subprocess.Popen[bytes]], said: bytes) -> None:
    path, _ = helper
    with connect(path) as link:
        link.sendall(said)
        link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(4096) == b""
    assert is_well(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    message=st.one_of(
        st.binary(max_size=64),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["kind", "password", "background", "argv", "x"]), inner, max_size=4)
            ),
            max_leaves=8,
        ),
        st.fixed_dictionaries({"kind": st.sampled_from(["check", "forget", "run"])}),
    ),
    num_files=st.integers(0, 5),
)
def test_no_message_ends_the_helper(
    helper: tuple[Path, subprocess.Popen[bytes]], message: object, num_files: int
) -> None:
    path, process = helper
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        with connect(path) as link:
            files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * num_files))] if num_files else []
            link.sendmsg([struct.pack("!I", len(body)) + body], files)
    finally:
        os.close(null)
    assert is_well(path)
    assert process.poll() is None


def test_an_incomplete_request_is_given_up_and_its_descriptors_are_closed(
    helper: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    path, process = helper
    before = psutil.Process(process.pid).num_fds()
    links = [connect(path) for _ in range(100)]
    for link in links[:64]:
        socket.send_fds(link, [b"\0"], [0, 1, 2])
    started = time.monotonic()
    for link in links[:64]:
        link.settimeout(30)
        assert link.recv(1) == b"", "it is given up after a while"
    assert time.monotonic() - started < 20
    for link in links:
        link.close()
    assert is_well(path)
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).num_fds() > before:
        assert time.monotonic() < deadline, "descriptors are left"
        time.sleep(0.05)


def test_other_requests_are_answered_while_one_is_incomplete(helper: tuple[Path, subprocess.Popen[bytes]]) -> None:
    path, _ = helper
    with connect(path) as half:
        half.sendall(b"\0\0")
        assert is_well(path)
        half.setblocking(False)
        with pytest.raises(BlockingIOError):
            half.recv(1)  # neither answered nor closed yet
