import subprocess
import sys
from pathlib import Path

import pytest

from env_server.guest.shared_memory import SharedMemory

CREATOR = """\
import ctypes, sys
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
address = libc.shmat(libc.shmget(0, 5000, 0o1777), None, 0)
for line in sys.stdin:
    ctypes.memmove(address + 4000, line.encode(), len(line))
    print("written", flush=True)
"""
"""Creates a segment with IPC_PRIVATE and IPC_CREAT, and writes each line of its input to byte 4000."""


def write(creator: "subprocess.Popen[str]", line: str) -> None:
    assert creator.stdin is not None
    assert creator.stdout is not None
    print(line, file=creator.stdin, flush=True)
    assert creator.stdout.readline() == "written\n"


def num_segments(creator: "subprocess.Popen[str]") -> int:
    return sum(int(line.split()[4]) == creator.pid for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])


def test_memory_of_another_process_is_read_as_it_is_now_and_ends_with_the_last_user() -> None:
    reads = "import sys, subprocess; from env_server.guest.shared_memory import SharedMemory\n"
    with subprocess.Popen([sys.executable, "-c", CREATOR], stdin=-1, stdout=-1, text=True) as creator:
        write(creator, "one")
        assert num_segments(creator) == 1
        code = f"{reads}m = SharedMemory({creator.pid}); a = m.array(4000, 3); print(bytes(a), flush=True)\n"
        code += "input(); print(bytes(a), flush=True); input(); print(bytes(a), flush=True)"
        with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "b'one'\n"
            write(creator, "two")
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "b'two'\n"
            creator.kill()
            creator.wait()
            assert num_segments(creator) == 1
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "b'two'\n"
    assert num_segments(creator) == 0


def test_reading_outside_the_segment_is_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", CREATOR], stdin=-1, stdout=-1, text=True) as creator:
        write(creator, "one")
        memory = SharedMemory(creator.pid)
        assert memory.read(4000, 3) == b"one"
        for start, size in ((-1, 5), (0, 5001), (4999, 2)):
            with pytest.raises(ValueError, match="outside the segment of 5000 bytes"):
                memory.read(start, size)


def test_a_process_without_shared_memory_is_named() -> None:
    with subprocess.Popen(["cat"], stdin=-1) as process, pytest.raises(LookupError, match=f"process {process.pid} has"):
        SharedMemory(process.pid)
