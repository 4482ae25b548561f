"""Metrics run in processes that can be ended: no pattern, text or file of a desktop blocks the server."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from fake_desktops import FakeDesktop

from env_server.evaluators import metric_processes
from env_server.evaluators.episode_cache import MAX_FILE_BYTES, EpisodeCache
from env_server.evaluators.grading import grade
from env_server.evaluators.metric_processes import MetricProcesses
from osworld_pipeline.errors import EvaluatorError
from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.reading import read_grader

CATASTROPHE = "^(a+)+$"
VICTIM = "a" * 60 + "b"
OTHERS: set[int] = set()
"""Process ids of servers that other tests of this worker keep."""


@pytest.fixture
async def metrics() -> AsyncIterator[MetricProcesses]:
    OTHERS.clear()
    OTHERS.update(child.pid for child in at_work())
    processes = MetricProcesses(cpu_limit_s=1)
    try:
        yield processes
    finally:
        await processes.close()
    assert not at_work(), "a process is left"


def at_work() -> list[psutil.Process]:
    """The child processes of this one that run metrics and that the test started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # the process has ended
            if child.pid not in OTHERS and "metric_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def text_file(text: str) -> ResultFile:
    return ResultFile(name="result.txt", data=text.encode())


async def test_the_score_is_that_of_the_metric_and_one_process_computes_many_scores(metrics: MetricProcesses) -> None:
    for _ in range(3):
        assert await metrics.run("exact_match", ["yes\n", {"expected": "yes\n"}], {}) == 1.0
        assert await metrics.run("literal_match", ["Yes", "yes"], {"ignore_case": True}) == 1.0
        assert await metrics.run("check_list", [text_file("a\nb"), {"expect": ["^b$"]}], {}) == 1.0
    assert len(at_work()) == 1


async def test_a_crash_is_the_graders_fault_and_the_next_metric_is_computed(metrics: MetricProcesses) -> None:
    with pytest.raises(EvaluatorError, match="the evaluator check_text_enlarged crashed: ValueError"):
        await metrics.run("check_text_enlarged", ["no number"], {})
    assert await metrics.run("check_text_enlarged", ["1.5"], {}) == 1.0


async def test_a_pattern_that_never_ends_scores_0_while_others_are_graded(
    metrics: MetricProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = asyncio.create_task(metrics.run("check_list", [text_file(VICTIM), {"expect": [CATASTROPHE]}], {}))
    await asyncio.sleep(0.3)
    assert await metrics.run("exact_match", ["a", {"expected": "a"}], {}) == 1.0
    assert not frozen.done()
    assert await frozen == 0.0
    assert "the metric check_list needs more than 1 s of CPU time" in caplog.text


async def test_a_metric_that_exceeds_its_memory_limit_scores_0(metrics: MetricProcesses) -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    rules = {"expect": [{"key": ["i"], "method": "eq", "ref": "no"}]}
    assert await metrics.run("check_json", [text_file(bomb), rules], {"is_yaml": True}) == 0.0
    wide = "x" * 30_000_000
    assert await metrics.run("fuzzy_match", [wide, {"expected": "y" * 1000}], {}) == 0.0


async def test_input_above_the_size_limit_scores_0_without_being_read(metrics: MetricProcesses) -> None:
    assert await metrics.run("exact_match", ["a" * (33 << 20), {"expected": "a"}], {}) == 0.0
    assert not at_work()


async def test_a_process_that_died_between_metrics_is_replaced(metrics: MetricProcesses) -> None:
    assert await metrics.run("exact_match", ["a", {"expected": "a"}], {}) == 1.0
    (child,) = at_work()
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await metrics.run("exact_match", ["a", {"expected": "a"}], {}) == 1.0


async def test_a_grading_that_is_cancelled_leaves_no_process_at_work(metrics: MetricProcesses) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await metrics.run("check_list", [text_file(VICTIM), {"expect": [CATASTROPHE]}], {})
    assert not at_work()
    assert await metrics.run("exact_match", ["a", {"expected": "a"}], {}) == 1.0


async def test_a_machine_too_slow_to_grade_is_not_a_failure_of_the_policy(
    metrics: MetricProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_processes, "WALL_LIMIT_S", 0.5)
    with pytest.raises(EvaluatorError, match=r"check_list took longer than 0\.5 s"):
        await metrics.run("check_list", [text_file(VICTIM), {"expect": [CATASTROPHE]}], {})


@pytest.mark.parametrize(
    ("func", "written"),
    [
        ("check_json", b"[" * 1_000_000),
        ("check_json", b"\xff\xfe"),
        ("check_csv", b'"' + b"a" * 200_000),
        ("check_list", b"\xff"),
        ("check_line_number", b"\x00" * 1000),
        ("compare_text_file", b"\xff\xff"),
        ("diff_text_file", b"a\n" * 100_000),
    ],
)
async def test_nothing_that_a_policy_writes_to_a_graded_file_is_a_fault(
    metrics: MetricProcesses, func: str, written: bytes
) -> None:
    rules: dict[str, Any] = {
        "check_json": {"type": "rule", "rules": {"expect": [{"key": ["a"], "method": "eq", "ref": 1}]}},
        "check_csv": {"type": "rule", "rules": {"expect": [{"a": "b"}]}},
        "check_list": {"type": "rule", "rules": {"expect": ["x"]}},
        "check_line_number": {"type": "rule", "rules": {"expected": "3"}},
    }
    expected = rules.get(func, {"type": "vm_file", "path": "/expected", "dest": "expected"})
    evaluator = {"func": func, "result": {"type": "vm_file", "path": "/result", "dest": "result"}, "expected": expected}
    desktop = FakeDesktop("d")
    desktop.files.update({"/result": written, "/expected": b"some text"})
    graded = grade(
        read_grader("t", evaluator), desktop.guest, EpisodeCache(), last_action="DONE", run_metric=metrics.run
    )
    assert 0.0 <= await graded < 0.5


async def test_a_file_too_large_to_be_an_answer_is_graded_as_if_it_were_not_there(metrics: MetricProcesses) -> None:
    evaluator = {
        "func": "file_contains",
        "result": {"type": "vm_file", "path": "/result", "dest": "result"},
        "expected": {"type": "rule", "rules": {"expected": ["a"]}},
    }
    desktop = FakeDesktop("d")
    for size, score in ((1000, 1.0), (MAX_FILE_BYTES + 1, 0.0)):
        desktop.files["/result"] = b"a" * size
        graded = grade(
            read_grader("t", evaluator), desktop.guest, EpisodeCache(), last_action="DONE", run_metric=metrics.run
        )
        assert await graded == score


def test_a_process_ends_with_its_server() -> None:
    code = (
        "import asyncio, os, psutil; from env_server.evaluators.metric_processes import MetricProcesses;"
        "asyncio.run(MetricProcesses().run('exact_match', ['a', {'expected': 'a'}], {}));"
        "print(psutil.Process().children()[0].pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
