"""Asks for the accessibility tree in a program of its own: it speaks to the desktop's message bus as the desktop's
user, and what the library makes of hostile programs is its own end and no other's."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from .programs import start_program

ANSWER_LIMIT_S = 55.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class _EndedError(OSError):
    """Instead of an answer."""


class AccessibilityHelper:
    """Started at the first question, as it costs a quarter of a second; again after it has ended. OSError where it does
    not answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def xml(self) -> str:
        return self._ask("xml") or ""

    def terminal_text(self) -> str | None:
        """Text of a terminal that exposes one; None where there is none."""
        return self._ask("terminal_text")

    def _ask(self, question: str) -> str | None:
        with self._lock:
            try:
                answer = self._answer(question)
            except _EndedError:  # maybe since the last question
                answer = self._answer(question)
        if not isinstance(answer, dict) or "error" in answer:
            raise OSError(f"no accessibility tree: {answer}")
        text = answer.get("answer")
        return None if text is None else str(text)

    def _answer(self, question: str) -> object:
        process = self._running()
        assert process.stdin is not None, "a pipe"
        try:
            process.stdin.write(f"{question}\n".encode())
            process.stdin.flush()
            return json.loads(_read_line(process, time.monotonic() + ANSWER_LIMIT_S))
        except (BrokenPipeError, _EndedError) as error:
            self._end()
            raise _EndedError("the program that reads the accessibility tree ended") from error
        except (OSError, ValueError) as error:
            self._end()
            raise OSError(f"no accessibility tree: {error}") from error

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = start_program(
                _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass


def _command() -> list[str]:
    package = Path(__file__).parent
    path = f"import sys; sys.path.insert(0, {str(package.parent)!r})"
    return [sys.executable, "-Ic", f"{path}; from {package.name}.accessibility import main; main()"]


def _read_line(process: subprocess.Popen[bytes], until: float) -> bytes:
    assert process.stdout is not None, "a pipe"
    parts, num_bytes = list[bytes](), 0
    while not parts or not parts[-1].endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"no answer within {ANSWER_LIMIT_S:g} s")
        part = os.read(process.stdout.fileno(), 1 << 20)
        num_bytes += len(part)
        if not part:
            raise _EndedError
        if num_bytes > MAX_ANSWER_BYTES:
            raise OSError(f"more than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
