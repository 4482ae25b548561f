"""The standard error of a child process: its end is kept for error messages, and its end of file shows that the last
process that held it is gone."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

KEPT_BYTES = 4000
SHARED_MEMORY_OF_XVFB = "screen 0 shmid "


class StderrTail:
    def __init__(self) -> None:
        self.is_silent = asyncio.Event()
        """Set once every process that could still write has ended."""
        self._tail = b""
        self._pipe = ""
        """The name of the pipe in /proc."""

    @property
    def lines(self) -> list[str]:
        """The text without the line that Xvfb writes at each start."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return [line for line in lines if not line.startswith(SHARED_MEMORY_OF_XVFB)]

    @contextmanager
    def capture(self) -> Iterator[int]:
        """The descriptor for the child that is started within the block; if the start fails, the pipe is closed."""
        read_end, write_end = os.pipe()
        try:
            yield write_end
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._pipe = os.readlink(f"/proc/self/fd/{read_end}")
        os.set_blocking(read_end, False)
        asyncio.get_running_loop().add_reader(read_end, self._read, read_end)

    def kill_writers(self) -> None:
        """Kills every process that still has this pipe as its standard error, including orphaned ones."""
        with suppress(OSError):  # no file descriptor is free; the caller tries again
            self._kill_writers()

    def _kill_writers(self) -> None:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/2") == self._pipe:
                    os.kill(int(pid), signal.SIGKILL)

    def _read(self, read_end: int) -> None:
        data = os.read(read_end, 65536)
        self._tail = (self._tail + data)[-KEPT_BYTES:]
        if not data:
            asyncio.get_running_loop().remove_reader(read_end)
            os.close(read_end)
            self.is_silent.set()
