"""The entrypoint of a queued job: it obeys its launcher and ends soon after it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.state import STATE_VARIABLE, StateDir
from osworld_pipeline.runs.launch.mailbox import Mailbox, MessageReader, mailbox_folder
from osworld_pipeline.runs.launch.queued_job import job_arguments
from osworld_pipeline.runs.messages import Failed, Message, Result, Started

TESTS = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0


def start_job(folder: Path, job: dict[str, Any], *, lost_after_s: float) -> tuple[subprocess.Popen[bytes], Mailbox]:
    state = StateDir(folder)
    mailbox = Mailbox(mailbox_folder(state, "job"))
    mailbox.folder.mkdir(parents=True)
    mailbox.put_job({"mark": "ray-job", **job})
    mailbox.beat()
    arguments = job_arguments(state, mailbox, "launched.program", num_ranks=1, lost_after_s=lost_after_s)
    process = subprocess.Popen(
        [sys.executable, "-m", "osworld_pipeline.runs.launch.queued_job", *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        start_new_session=True,
    )
    return process, mailbox


def wait_until_begun(mailbox: Mailbox) -> None:
    """Keeps the launcher's heartbeat until the program has sent a message of its own."""
    deadline = time.monotonic() + PATIENCE_S
    while not any("begun" in path.read_text() for path in mailbox.folder.glob("messages-*.jsonl")):
        assert time.monotonic() < deadline, "the program did not begin"
        mailbox.beat()
        time.sleep(0.05)


def messages_until_end(process: subprocess.Popen[bytes], mailbox: Mailbox) -> list[Message]:
    process.wait(PATIENCE_S)
    return MessageReader(mailbox=mailbox).read()


def test_the_first_message_of_a_job_is_that_it_started_and_the_last_is_its_result(tmp_path: Path):
    process, mailbox = start_job(tmp_path, {"act": "sum", "numbers": [1, 2]}, lost_after_s=60)
    messages = messages_until_end(process, mailbox)
    assert process.returncode == 0
    assert messages[0] == Started()
    assert messages[-1] == Result(result={"sum": 3, "secret": None})


@pytest.mark.parametrize(("act", "status", "retryable"), [("fail", 2, False), ("fault", 3, True)])
def test_a_failure_says_whether_it_may_be_tried_again(tmp_path: Path, act: str, status: int, retryable: bool):
    process, mailbox = start_job(tmp_path, {"act": act}, lost_after_s=60)
    last = messages_until_end(process, mailbox)[-1]
    assert process.returncode == status
    assert isinstance(last, Failed)
    assert last.retryable is retryable


def test_a_job_that_is_asked_to_stop_unwinds(tmp_path: Path):
    process, mailbox = start_job(tmp_path, {"act": "wait", "clean_up": str(tmp_path / "clean")}, lost_after_s=60)
    wait_until_begun(mailbox)
    mailbox.ask_to_stop()
    last = messages_until_end(process, mailbox)[-1]
    assert process.returncode == 143
    assert isinstance(last, Failed)
    assert last.type == "Stopped"
    assert (tmp_path / "clean-0").exists()


def test_a_job_whose_launcher_is_silent_unwinds_and_removes_the_mailbox(tmp_path: Path):
    process, mailbox = start_job(tmp_path, {"act": "wait", "clean_up": str(tmp_path / "clean")}, lost_after_s=2)
    wait_until_begun(mailbox)
    process.wait(PATIENCE_S)
    assert process.returncode == 143
    assert (tmp_path / "clean-0").exists()
    assert not mailbox.folder.exists()


def test_a_job_that_another_start_has_taken_is_an_error(tmp_path: Path):
    process, mailbox = start_job(tmp_path, {"act": "sum", "numbers": []}, lost_after_s=60)
    process.wait(PATIENCE_S)
    again = start_again(job_arguments(StateDir(tmp_path), mailbox, "launched.program", num_ranks=1, lost_after_s=60))
    assert again.returncode == 2
    assert b"there is no job" in again.stderr


def test_a_job_on_a_host_without_the_state_is_an_error_that_says_so(tmp_path: Path):
    (tmp_path / "there").mkdir()
    state = StateDir(tmp_path / "there")
    mailbox = Mailbox(mailbox_folder(state, "job"))
    arguments = job_arguments(state, mailbox, "launched.program", num_ranks=1, lost_after_s=60)
    state.root.rename(tmp_path / "elsewhere")
    refused = start_again(arguments)
    assert refused.returncode == 2
    assert f"StoreError: the state folder of this run is not at {state.root} on host " in refused.stderr.decode()


def start_again(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "osworld_pipeline.runs.launch.queued_job", *arguments],
        env={name: value for name, value in os.environ.items() if name != STATE_VARIABLE},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
