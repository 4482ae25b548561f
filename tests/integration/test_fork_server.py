"""Programs forked from a process that has imported everything: each behaves as if it was started on its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from osworld_pipeline.runs.launch.fork_server import ForkedProgram, kept_fork_server, start_warm

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys, time
from osworld_pipeline.errors import TableError

def main(job, report):
    about = {"cpu_s": time.process_time(), "has_torch": "torch" in sys.modules, "pid": os.getpid(),
             "session": os.getsid(0), "parent": os.getppid(), "word": os.environ.get("WORD")}
    print(json.dumps(about), flush=True)
    print("an error of its own", file=sys.stderr, flush=True)
    if job["do"] == "fail":
        raise TableError("there is no such table")
    time.sleep(60 if job["do"] == "sleep" else 0)
    return {}
"""
Start = Callable[..., tuple[ForkedProgram, Path]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a program inside one kept fork server; gives it and its log."""
    folder = tmp_path_factory.mktemp("programs")
    path = with_program(folder)
    with pytest.MonkeyPatch.context() as patch, kept_fork_server({"PYTHONPATH": path}):
        patch.setenv("PYTHONPATH", path)
        numbers = iter(range(100))

        def start_sample(do: str, **environment: str) -> tuple[ForkedProgram, Path]:
            log = folder / f"{next(numbers)}.log"
            with log.open("wb") as output:
                program = start_warm(
                    "warm_programs.sample", partial(job_file, folder, {"do": do}), output=output.fileno(),
                    environment=environment,
                )  # fmt: skip
            assert program is not None
            return program, log

        yield start_sample


def with_program(folder: Path) -> str:
    """Writes the program, and returns the PYTHONPATH that contains it."""
    package = folder / "warm_programs"
    package.mkdir()
    (package / "sample.py").write_text(PROGRAM)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def job_file(folder: Path, job: Mapping[str, Any], parent_pid: int) -> Iterator[int]:
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "parent_pid": parent_pid}))
    with path.open("rb") as file:
        yield file.fileno()


def said(log: Path, *, limit_s: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while not (lines := [line for line in log.read_text().splitlines() if line.startswith("{")]):
        assert time.monotonic() < deadline, "the program said nothing"
        time.sleep(0.02)
    return json.loads(lines[0])


def test_a_program_gets_streams_environment_and_session_of_its_own_and_imports_nothing_anew(start: Start) -> None:
    for word in ("first", "second"):
        program, log = start("end", WORD=word)
        assert program.wait(60) == 0
        about = said(log)
        assert about["word"] == word
        assert about["pid"] == about["session"] == program.pid
        assert about["has_torch"]
        assert about["cpu_s"] < 1.0, "imports of torch and transformers take several seconds"
        assert "an error of its own" in log.read_text()


def test_the_end_of_a_program_is_reported_as_for_any_process(start: Start) -> None:
    failed, log = start("fail")
    assert failed.wait(60) == 2
    assert "TableError: there is no such table" in log.read_text()

    stopped, log = start("sleep")
    said(log)
    assert stopped.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.1)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(30) == 143

    killed, log = start("sleep")
    said(log)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    killed.send_signal(signal.SIGTERM)  # no process receives it


def test_the_fork_server_imports_before_the_first_program_and_ends_with_the_block() -> None:
    ours = psutil.Process()
    before = set(ours.children())
    with kept_fork_server({}):
        (server,) = set(ours.children()) - before
        deadline = time.monotonic() + 120
        while not any("libtorch" in one.path for one in server.memory_maps()):
            assert time.monotonic() < deadline, "torch was not imported"
            time.sleep(0.1)
    assert not _is_alive(server.pid)


def test_programs_are_not_forked_outside_the_block(tmp_path: Path) -> None:
    script = (
        "import os; from osworld_pipeline.runs.launch.fork_server import start_warm\n"
        "assert start_warm('collect', None, output=1, environment={}) is None"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_program_dies_with_its_fork_server_and_the_next_program_is_not_forked(tmp_path: Path) -> None:
    def job(do: str) -> Callable[[int], AbstractContextManager[int]]:
        return partial(job_file, tmp_path, {"do": do})

    log, path = tmp_path / "log", with_program(tmp_path)
    with (
        pytest.MonkeyPatch.context() as patch,
        kept_fork_server({"PYTHONPATH": path}),
        log.open("wb") as output,
    ):
        patch.setenv("PYTHONPATH", path)
        start = partial(start_warm, "warm_programs.sample", output=output.fileno(), environment={})
        program = start(job("sleep"))
        assert program is not None
        os.kill(said(log)["parent"], signal.SIGKILL)
        assert program.wait(30) == -signal.SIGKILL
        assert not psutil.pid_exists(program.pid) or psutil.Process(program.pid).status() == psutil.STATUS_ZOMBIE
        assert start(job("end")) is None


def test_no_process_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""
import contextlib, json, sys, time
from osworld_pipeline.runs.launch.fork_server import kept_fork_server, start_warm

@contextlib.contextmanager
def job(parent_pid):
    with open({str(tmp_path / "job.json")!r}, "w+") as file:
        json.dump({{"do": "sleep", "parent_pid": parent_pid}}, file)
        file.flush()
        yield file.fileno()

with kept_fork_server({{}}), open({str(log)!r}, "wb") as output:
    start_warm("warm_programs.sample", job, output=output.fileno(), environment={{}})
    time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": with_program(tmp_path)}
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        about = said(log, limit_s=120)
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 30
    while left := [pid for pid in (about["pid"], about["parent"]) if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
