"""System V shared memory of another process, for reading. Unlike a mapped file, it cannot be truncated by its owner."""

import ctypes
from pathlib import Path

_SEGMENTS = Path("/proc/sysvipc/shm")
"""One line for each segment of this IPC namespace, with the columns of proc(5) in this order, after a title line."""
_ID, _SIZE, _CREATOR = 1, 3, 4
_READ_ONLY = 0o10000
_REMOVE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.shmat.restype = ctypes.c_void_p
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


class SharedMemory:
    """The first segment that a process has created. It stays readable after that process has ended or removed it."""

    def __init__(self, creator: int) -> None:
        """LookupError if process `creator` has no segment, OSError if it cannot be attached."""
        segment, self._size = _first_segment(creator)
        self._address = _libc.shmat(segment, None, _READ_ONLY)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), "shmat")
        # The segment now ends with the last process that uses it, even if its creator is killed. The call fails where
        # this process is not the owner: in a sandbox, where all memory ends with the IPC namespace.
        _libc.shmctl(segment, _REMOVE, None)

    def read(self, start: int, size: int) -> bytes:
        return bytes(self.array(start, size))

    def array(self, start: int, size: int) -> "ctypes.Array[ctypes.c_ubyte]":
        """The memory itself, without a copy: its content changes when the other process writes. ValueError if the
        segment is smaller."""
        if start < 0 or start + size > self._size:
            raise ValueError(f"bytes {start} to {start + size} are outside the segment of {self._size} bytes")
        return (ctypes.c_ubyte * size).from_address(self._address + start)


def holds(array: "ctypes.Array[ctypes.c_ubyte]", content: bytes) -> bool:
    """Whether the memory has this content now; nothing is copied."""
    return len(array) == len(content) and _libc.memcmp(array, content, len(content)) == 0


def _first_segment(creator: int) -> tuple[int, int]:
    for line in _SEGMENTS.read_text().splitlines()[1:]:
        words = line.split()
        if int(words[_CREATOR]) == creator:
            return int(words[_ID]), int(words[_SIZE])
    raise LookupError(f"process {creator} has no shared memory")
