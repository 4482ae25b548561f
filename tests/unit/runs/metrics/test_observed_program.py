"""A program serves its metrics while it runs, if the setting is there, and also runs where they cannot be served."""

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scraped import scrape, targets_in

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.__main__ import EXIT_FATAL, run_program
from osworld_pipeline.runs.messages import Failed, Info, Message, Progress, Result, Warned
from osworld_pipeline.wire.metrics_endpoint import TOKEN_VARIABLE, VARIABLE

PROGRAM = """
from osworld_pipeline.runs.messages import Progress

def main(job, report):
    report(Progress(done=1, total=2))
    return {}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return {"state_root": str(tmp_path / "state")}


def run(job: dict[str, Any], seen: Any = lambda message: None) -> tuple[int, list[Message]]:
    reported: list[Message] = []

    def report(message: Message) -> None:
        reported.append(message)
        seen(message)

    return run_program("seen.program", job, report), reported


def test_metrics_are_served_while_the_program_runs_and_its_address_is_in_a_file(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    folder = StateDir(Path(job["state_root"])).metrics_targets
    found: dict[str, float] = {}

    def seen(message: Message) -> None:
        if isinstance(message, Progress):
            (target,) = targets_in(folder).values()
            found.update(scrape(target))

    status, reported = run({**job, "checkpoint_id": "c-1"}, seen)
    assert status == 0
    assert found["osworld_program c-1 seen.program"] == 1
    assert found["osworld_progress_done seen.program"] == 1
    assert isinstance(reported[0], Info)
    assert reported[0].message.startswith("metrics: http://127.0.0.1:")
    assert reported[-1] == Result(result={})
    assert list(folder.iterdir()) == []


def test_no_metrics_are_served_without_the_setting_or_by_further_ranks(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert run(job)[1] == [Progress(done=1, total=2), Result(result={})]
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setenv("RANK", "1")
    assert run(job)[1] == [Progress(done=1, total=2), Result(result={})]
    assert not StateDir(Path(job["state_root"])).metrics_targets.exists()


def test_a_program_runs_without_metrics_where_its_port_is_taken(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        monkeypatch.setenv(VARIABLE, str(taken.getsockname()[1]))
        status, reported = run(job)
    assert status == 0
    assert isinstance(reported[0], Warned)
    assert reported[0].message.startswith("no metrics are served: 127.0.0.1 port")


def test_a_setting_that_is_not_valid_ends_the_program_before_its_work(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(VARIABLE, "0.0.0.0:9500")
    status, reported = run(job)
    assert status == EXIT_FATAL
    (failed,) = reported
    assert isinstance(failed, Failed)
    assert "without a token" in failed.message
