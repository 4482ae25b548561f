"""For tests of the launchers: start one in a process of its own, see which processes are left."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PATIENCE_S = 600.0
_numbers = itertools.count()


def new_mark() -> str:
    """A name for the processes of one program; a kernel keeps 15 characters."""
    return f"mark{os.getpid()}-{next(_numbers)}"[-15:]


def marked(mark: str) -> list[int]:
    """Living processes with a thread of that name."""
    return [int(process) for process in os.listdir("/proc") if process.isdigit() and _has_thread(process, mark)]


def _has_thread(process: str, mark: str) -> bool:
    # A process or a thread may be gone between any two of these lines.
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                folder = Path(f"/proc/{process}/task/{task}")
                if (folder / "comm").read_text().strip() == mark and "\nState:\tZ" not in (
                    folder / "status"
                ).read_text():
                    return True
    return False


def wait_until(is_so: Callable[[], Any], what: str, *, limit_s: float = PATIENCE_S) -> Any:
    """Scanning every thread of a machine is slow, so the checks take a fifth of the time at most."""
    deadline = time.monotonic() + limit_s
    while True:
        begun = time.monotonic()
        if answer := is_so():
            return answer
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(max(0.05, 4 * (time.monotonic() - begun)))


def environment(*installed: Path) -> dict[str, str]:
    """`installed`: folders with further distributions."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *installed))), "OMP_NUM_THREADS": "1"}


def start_launch(
    folder: Path,
    on: dict[str, Any],
    program: str,
    job: dict[str, Any],
    *,
    num_processes: int = 1,
    installed: Sequence[Path] = (),
) -> Any:
    """Starts the launcher as a Dagster step in a process of its own; its state is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / "request.json"
    request.write_text(
        json.dumps(
            {"on": on, "program": program, "job": job, "state_root": str(folder), "num_processes": num_processes}
        )
    )
    return subprocess.Popen(
        [sys.executable, str(TESTS / "launch_process.py"), str(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(*installed),
    )


def finish(launch: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All messages of the launch, the outcome last."""
    try:
        output, errors = launch.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        launch.kill()
        output, errors = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode == 0, f"{errors}\n{output}"
    return [json.loads(line) for line in output.splitlines()]


def cancel(launch: subprocess.Popen[str]) -> dict[str, Any]:
    """Cancels the launch as Dagster cancels a run; returns the outcome."""
    launch.send_signal(signal.SIGINT)
    return finish(launch)[-1]


def kill(launch: subprocess.Popen[str]) -> None:
    launch.kill()
    launch.communicate(timeout=PATIENCE_S)


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that name `folder`, or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            works_here = os.readlink(entry / "cwd").startswith(str(folder))
        except OSError:
            continue
        if command and (works_here or str(folder) in command):
            found.append(f"{entry.name}: {command[:160]}")
    return found


def wait_for_no_process(folder: Path, *, limit_s: float) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
