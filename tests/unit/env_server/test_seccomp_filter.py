"""The system-call filter, run in a small interpreter of the tests, and once in the real kernel."""

import errno
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from env_server.guest.seccomp import CHANGES_LIMITS, DENIED, FAMILIES, MAKES_SOCKETS, build_filter

ALLOW, EPERM, NO_FAMILY = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.EAFNOSUPPORT
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003


def verdict(machine: str, number: int, *, architecture: int | None = None, argument: int = 1) -> int:
    """What the kernel would answer, computed with the four instructions that the filter uses."""
    program = list(struct.iter_unpack("=HBBI", build_filter(machine) or b""))
    data = {0: number, 4: ARCHITECTURES[machine] if architecture is None else architecture, 16: argument}
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        elif code == 0x35:
            at += if_true if accumulator >= value else if_false
        else:
            assert code == 0x06
            return value


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_every_denied_call_fails_and_every_other_passes(machine: str, column: int) -> None:
    denied = {numbers[column] for numbers in DENIED.values()} - {None}
    assert len(denied) >= 35
    for number in range(500):
        assert verdict(machine, number, argument=0 if number == CHANGES_LIMITS[column] else 1) == (
            EPERM if number in denied else ALLOW
        ), number


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_a_process_can_change_only_its_own_limits(machine: str, column: int) -> None:
    assert verdict(machine, CHANGES_LIMITS[column], argument=0) == ALLOW
    assert verdict(machine, CHANGES_LIMITS[column], argument=1) == EPERM


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_only_sockets_of_known_families_can_be_made(machine: str, column: int) -> None:
    for numbers in MAKES_SOCKETS.values():
        passed = {family for family in range(64) if verdict(machine, numbers[column], argument=family) == ALLOW}
        assert passed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK} == set(FAMILIES.values())
        assert verdict(machine, numbers[column], argument=socket.AF_VSOCK) == NO_FAMILY


def test_calls_by_another_numbering_are_denied() -> None:
    getpid = 39
    assert verdict("x86_64", getpid) == ALLOW
    assert verdict("x86_64", getpid | 0x40000000) == EPERM
    assert verdict("x86_64", getpid, architecture=I386) == EPERM


def test_an_unknown_machine_has_no_filter() -> None:
    assert build_filter("riscv64") is None


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_a_filtered_process_and_its_children_cannot_make_a_denied_call() -> None:
    source = Path(__file__).parents[3] / "env_server/guest/seccomp.py"
    code = (
        f"import ctypes, os; exec(open({str(source)!r}).read()); libc = ctypes.CDLL(None, use_errno=True);"
        "libc.prctl(38, 1, 0, 0, 0); print(install_filter(), flush=True);"
        "number = DENIED['keyctl'][_MACHINES[os.uname().machine][0]];"
        "s = __import__('socket');"
        "print([s.AF_VSOCK, libc.socket(s.AF_VSOCK, 1, 0), ctypes.get_errno(), libc.socket(s.AF_UNIX, 1, 0) > 0],"
        "flush=True);"
        "os.fork(); answer = f'{libc.syscall(number, 0, 0, 0, 0, 0)} {ctypes.get_errno()}\\n';"
        "os.write(1, answer.encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == [
        "True",
        f"[<AddressFamily.AF_VSOCK: 40>, -1, {errno.EAFNOSUPPORT}, True]",
        f"-1 {errno.EPERM}",
        f"-1 {errno.EPERM}",
    ]
