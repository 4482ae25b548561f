"""Runs the programs of a release with a time limit."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from scripts.release.errors import ReleaseError

LIMIT_S = 120.0


def output_of(
    *words: object,
    cwd: Path,
    data: bytes = b"",
    variables: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> bytes:
    """Standard output of a program that must succeed. Raises ReleaseError with the end of its error output."""
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command, cwd=cwd, input=data, env=variables, capture_output=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        raise ReleaseError(f"`{' '.join(command)}` failed with status {done.returncode}: {said}")
    return done.stdout


def run_shown(*words: object, cwd: Path, limit_s: float) -> None:
    """A program that must succeed, with its output in this terminal. Raises ReleaseError."""
    command = [str(word) for word in words]
    try:
        code = subprocess.run(command, cwd=cwd, timeout=limit_s, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"`{' '.join(command)}` failed: {error}; nothing was changed") from error
    if code:
        raise ReleaseError(f"`{' '.join(command)}` failed with status {code}; nothing was changed")
