"""Ranks on one machine under torchrun: if any of the processes is stopped or killed, nothing of the program is left."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from launches import PATIENCE_S, cancel, environment, kill, marked, new_mark, start_launch, wait_until

from osworld_pipeline.runs.messages import Failed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_ranks(job: dict[str, Any], scratch: Path, *, num_ranks: int = 2) -> subprocess.Popen[bytes]:
    """Starts the ranks as the local launcher does, with the job in an unnamed file."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(job).encode())
        stdin.flush()
        ranks = ["launched.program", str(num_ranks), str(os.getpid()), str(scratch)]
        return subprocess.Popen(
            [sys.executable, "-m", "osworld_pipeline.runs.launch.ranks", *ranks],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(),
        )


def test_the_error_of_the_rank_that_failed_is_reported(tmp_path: Path):
    mark = new_mark()
    process = run_ranks({"act": "fail", "rank": "1", "mark": mark}, tmp_path)
    status = process.wait(PATIENCE_S)
    failure = Failed.model_validate_json((tmp_path / "failure.json").read_text())
    assert (failure.type, failure.message) == ("TrainingError", "the loss is not finite")
    assert (status, failure.retryable) == (2, False)
    assert marked(mark) == []


def test_a_killed_rank_ends_all_ranks_and_its_failure_is_retryable(tmp_path: Path):
    mark = new_mark()
    process = run_ranks({"act": "wait", "mark": mark}, tmp_path)
    pids = wait_until(lambda: found if len(found := marked(mark)) == 2 else None, "two ranks run")
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 3
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "was killed by SIGKILL" in failure["message"]
    assert failure["retryable"] is True
    assert marked(mark) == []


def test_ranks_die_with_a_killed_torchrun(tmp_path: Path):
    mark = new_mark()
    process = run_ranks({"act": "wait", "mark": mark}, tmp_path)
    wait_until(lambda: len(marked(mark)) == 2, "two ranks run")
    process.kill()
    process.wait(PATIENCE_S)
    wait_until(lambda: not marked(mark), "no rank is left", limit_s=10)


def test_a_cancelled_step_lets_every_rank_clean_up_and_is_not_retried(tmp_path: Path):
    mark = new_mark()
    job = {"act": "wait", "mark": mark, "clean_up": str(tmp_path / "clean")}
    launch = start_launch(tmp_path / "state", {"local": {}}, "launched.program", job, num_processes=2)
    wait_until(lambda: len(marked(mark)) == 2, "two ranks run")
    outcome = cancel(launch)
    assert outcome == {"kind": "failed", "message": "launched.program was cancelled", "allow_retries": False}
    assert marked(mark) == []
    assert sorted(path.name for path in tmp_path.glob("clean-*")) == ["clean-0", "clean-1"]


def test_ranks_end_with_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark, secret = new_mark(), "hush-hush-7391"
    job = {"act": "wait", "mark": mark, "secret": secret}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    launch = start_launch(tmp_path / "state", {"local": {}}, "launched.program", job, num_processes=2)
    pids = wait_until(lambda: found if len(found := marked(mark)) == 2 else None, "two ranks run")
    for pid in pids:
        for shown in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{shown}").read_bytes()
    kill(launch)
    wait_until(lambda: not marked(mark), "no rank is left", limit_s=45)
    wait_until(lambda: not list(scratch.glob("ranks-*")), "no folder of the ranks is left", limit_s=45)
