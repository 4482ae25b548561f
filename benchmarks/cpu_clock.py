"""CPU time of each kind of program while a block runs."""

import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from benchmarks.processes import cpu_s, processes_below

POLL_S = 0.1
UNSEEN = "unseen: short programs, the kernel"
"""Busy time of the machine that no sample of the processes shows; it includes all other programs of the machine."""
NAMES = {"env_server.main": "env server", "-ISc": "guest agent"}
"""Names of Python programs, by a word of their command line."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuClock:
    """Samples this process and all its descendants ten times a second."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}
        self._at_start: dict[tuple[int, str], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._busy_s = 0.0

    def __enter__(self) -> Self:
        self._at_start = self._look()
        self._busy_s = _busy_s()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._seconds |= self._look()
        self._busy_s = _busy_s() - self._busy_s

    @property
    def seconds(self) -> Mapping[str, float]:
        """Core-seconds, by program."""
        used = defaultdict[str, float](float)
        for (pid, name), value in self._seconds.items():
            used[name] += value - self._at_start.get((pid, name), 0.0)
        used[UNSEEN] = max(0.0, self._busy_s - sum(used.values()))
        return dict(used)

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._seconds |= self._look()

    def _look(self) -> dict[tuple[int, str], float]:
        seen: dict[tuple[int, str], float] = {}
        for pid in (os.getpid(), *processes_below(os.getpid())):
            try:
                seen[pid, _name(pid)] = cpu_s(pid)
            except (OSError, IndexError):
                continue
        return seen


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "this program, the model in it"
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    for word, name in NAMES.items():
        if word in words:
            return name
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _busy_s() -> float:
    """Busy seconds of all cores since the machine started: neither idle nor waiting for a disk."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, *interrupts = map(int, fields[:7])
    return (user + nice + system + sum(interrupts)) / _TICKS_PER_S
