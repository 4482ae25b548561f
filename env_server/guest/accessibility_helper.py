"""Requests the accessibility tree from a separate program. It connects to the desktop's message bus as the desktop's
user, and if a hostile program crashes the library, only that program ends."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from .message_bus import DisabledError, MessageBuses, StopWatch
from .programs import start_program

ANSWER_LIMIT_S = 55.0
WATCH_INTERVAL_S = 0.25
END_LIMIT_S = 1.0
"""Time from the end of its output to its exit."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class _EndedError(OSError):
    """The program ended instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the program that reads the accessibility tree ended with status {status}")
        self.was_killed = status < 0


class AccessibilityHelper:
    """Started at the first request, which costs a quarter of a second, and again after it has ended. OSError if it does
    not answer, DisabledError if programs of the desktop are the cause."""

    def __init__(self, buses: MessageBuses) -> None:
        self._buses = buses
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def xml(self) -> str:
        return self._ask("xml") or ""

    def terminal_text(self) -> str | None:
        """Text of a terminal that exposes one; None if there is none."""
        return self._ask("terminal_text")

    def _ask(self, question: str) -> str | None:
        with self._lock:
            try:
                answer = self._answer_of_two(question)
                if not isinstance(answer, dict) or "error" in answer:
                    raise OSError(f"no accessibility tree: {answer}")
            except OSError as error:
                ending = self._buses.ending()
                if ending is not None:
                    raise DisabledError(ending) from error
                raise
            self._buses.remember()
        text = answer.get("answer")
        return None if text is None else str(text)

    def _answer_of_two(self, question: str) -> object:
        with contextlib.suppress(_EndedError):  # it may have ended since the last request
            return self._answer(question)
        try:
            return self._answer(question)
        except _EndedError as error:
            if error.was_killed:
                raise DisabledError("the program that reads the accessibility tree was ended") from error
            raise

    def _answer(self, question: str) -> object:
        process = self._running()
        assert process.stdin is not None, "a pipe"
        try:
            process.stdin.write(f"{question}\n".encode())
            process.stdin.flush()
            watch = StopWatch(self._buses, process.pid)
            return json.loads(_read_line(process, time.monotonic() + ANSWER_LIMIT_S, watch))
        except (BrokenPipeError, EOFError) as error:
            raise _EndedError(self._end(END_LIMIT_S)) from error
        except (OSError, ValueError) as error:
            self._end()
            raise OSError(f"no accessibility tree: {error}") from error
        except DisabledError:
            self._end()
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = start_program(
                _command(),
                serves_calls=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        return self._process

    def _end(self, grace_s: float = 0.0) -> int:
        """Returns its exit status."""
        process, self._process = self._process, None
        assert process is not None, "only called after a request"
        with process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
        return process.returncode


def _command() -> list[str]:
    package = Path(__file__).parent
    path = f"import sys; sys.path.insert(0, {str(package.parent)!r})"
    return [sys.executable, "-Ic", f"{path}; from {package.name}.accessibility import main; main()"]


def _read_line(process: subprocess.Popen[bytes], until: float, watch: StopWatch) -> bytes:
    assert process.stdout is not None, "a pipe"
    parts, num_bytes = list[bytes](), 0
    while not parts or not parts[-1].endswith(b"\n"):
        if not select.select([process.stdout], [], [], WATCH_INTERVAL_S)[0]:
            watch.look()
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {ANSWER_LIMIT_S:g} s")
            continue
        part = os.read(process.stdout.fileno(), 1 << 20)
        num_bytes += len(part)
        if not part:
            raise EOFError
        if num_bytes > MAX_ANSWER_BYTES:
            raise OSError(f"more than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
