"""Runs other programs with a time limit: each in its own session, killed as a group, and killed if this process
dies."""

import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.errors import DependencyError

KILL_WAIT_S = 1.0


@dataclass(frozen=True)
class Said:
    status: int
    stdout: str
    stderr: str

    @property
    def stderr_tail(self) -> str:
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"status {self.status}, without a message"


def ask(argv: Sequence[str], *, limit_s: float) -> Said:
    """Runs a program to its end; returns its exit status and output.

    Raises:
        DependencyError: it cannot be started, or did not exit in time.
    """
    process = _start(argv)
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        return Said(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired as error:
        raise DependencyError(f"{Path(argv[0]).name} did not respond within {limit_s:g} s") from error
    finally:
        _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def ask_lines(argv: Sequence[str], *, limit_s: float) -> Iterator[str]:
    """The lines of its standard output, as they arrive.

    Raises:
        DependencyError: it cannot be started, or did not exit in time; its earlier output has been yielded.
    """
    process = _start(argv, stderr=subprocess.DEVNULL)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    deadline = time.monotonic() + limit_s
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as error:
                raise DependencyError(f"{Path(argv[0]).name} did not exit within {limit_s:g} s") from error
            if line is None:
                return
            yield line
    finally:
        _end(process)


def _read(process: subprocess.Popen[str], lines: "queue.SimpleQueue[str | None]") -> None:
    assert process.stdout is not None
    with process.stdout as said:
        for line in said:
            lines.put(line)
    lines.put(None)


def _start(argv: Sequence[str], *, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    if shutil.which(argv[0]) is None:
        raise DependencyError(f"there is no program {argv[0]}")
    setpriv = shutil.which("setpriv")
    guard = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    try:
        return subprocess.Popen(
            [*guard, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise DependencyError(f"{argv[0]} cannot be started ({error.strerror})") from error


def _end(process: subprocess.Popen[str]) -> None:
    """Kills the process group. A process that hangs in the kernel survives SIGKILL; it is not waited for."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)
