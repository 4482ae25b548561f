"""Programs that the doctor runs are ended with all their child processes, and not waited for beyond their limit."""

import os
import sys
import time
from pathlib import Path

import pytest

from osworld_pipeline.doctor.machine import check_gpu
from osworld_pipeline.doctor.programs import ask, ask_lines
from osworld_pipeline.domain.finding import Status
from osworld_pipeline.errors import DependencyError


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def put_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(DependencyError, match=r"sh did not respond within 0\.5 s"):
        ask(["/bin/sh", "-c", script], limit_s=0.5)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5.0
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(child)


def test_a_missing_program_is_reported_by_name() -> None:
    with pytest.raises(DependencyError, match="there is no program no-such-program"):
        ask(["no-such-program"], limit_s=5.0)


def test_lines_are_returned_until_the_time_limit() -> None:
    lines = ask_lines(["/bin/sh", "-c", "echo one; echo two; sleep 60"], limit_s=1.0)
    assert [next(lines), next(lines)] == ["one\n", "two\n"]
    with pytest.raises(DependencyError, match="did not exit within 1 s"):
        next(lines)


def test_all_lines_of_a_program_that_ends_are_returned() -> None:
    assert list(ask_lines([sys.executable, "-c", "print('a\\nb')"], limit_s=20.0)) == ["a\n", "b\n"]


def test_a_program_ends_when_its_doctor_is_killed(tmp_path: Path) -> None:
    code = (
        "from osworld_pipeline.doctor.programs import ask\n"
        f"ask(['/bin/sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], limit_s=60)"
    )
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    deadline = time.monotonic() + 20.0
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    asked = int((tmp_path / "pid").read_text())
    while is_alive(asked) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(asked)


def test_an_nvidia_smi_that_hangs_is_reported_within_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(tmp_path, "nvidia-smi", "sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(DependencyError, match=r"nvidia-smi did not respond within 0\.5 s"):
        check_gpu("gpu", limit_s=0.5)


def test_a_driver_that_finds_no_gpu_and_one_that_finds_two_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    put_program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    found = check_gpu("gpu")
    assert found.status == Status.WARN
    assert "No devices were found" in found.message
    put_program(tmp_path, "nvidia-smi", "echo 'H100, 81559 MiB, 580.1'; echo 'H100, 81559 MiB, 580.1'")
    assert check_gpu("gpu").message == "2 GPUs: H100, 81559 MiB, 580.1"
