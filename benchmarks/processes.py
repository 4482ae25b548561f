"""Programs that a benchmark starts, and their CPU time and memory as reported by the kernel."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """A benchmark cannot be run here, or the measured program failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Started:
    process: subprocess.Popen[bytes]
    log: Path

    def stderr_tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]


@contextmanager
def started(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Run a program during the block; TERM at its end, KILL if it does not exit."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    try:
        yield Started(process=process, log=log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_ready_file(ready: Path, program: Started) -> str:
    """The address that an env server has written into its ready file."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready.exists():
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the env server did not become ready:\n{program.stderr_tail()}")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, without its running children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def processes_below(pid: int) -> set[int]:
    """Every descendant of process `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def memory_mb(pids: set[int]) -> dict[str, float]:
    """Total `pss` (shared pages divided among their users) and `anonymous` (private) memory of processes, in MB of
    10**6 bytes."""
    totals = {"pss": 0, "anonymous": 0}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            if name == "Pss":
                totals["pss"] += int(rest.split()[0]) * 1024
            elif name == "Anonymous":
                totals["anonymous"] += int(rest.split()[0]) * 1024
    return {name: num_bytes / 1e6 for name, num_bytes in totals.items()}
