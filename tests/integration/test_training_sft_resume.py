"""SFT as a process of its own, killed without warning and started again."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_process import NUM_UPDATES, PATIENCE_S, finish, prepare, start

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.sft import train_sft
from osworld_pipeline.runs.sft.job import SftJob
from osworld_pipeline.tables.catalog import fresh_views


def kill_at(process: subprocess.Popen[str], kind: str, update: int) -> None:
    """Sends SIGKILL as soon as the process reports a message of that kind for that update or a later one."""
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    for line in process.stdout:
        assert time.monotonic() < deadline, f"no {kind} of update {update} in time"
        message = json.loads(line)
        if message["kind"] == kind and message["update"] >= update:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGKILL


def rows_of(root: Path, sql: str) -> list[tuple[Any, ...]]:
    with fresh_views(StateDir(root)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path):
    whole = prepare(tmp_path / "whole")
    broken = prepare(tmp_path / "broken")
    kill_at(start(broken), "metrics", 20)
    resumed = start(broken)
    num_threads = torch.get_num_threads()
    try:
        train_sft.main(SftJob.model_validate(whole), lambda message: None)
    finally:
        torch.set_num_threads(num_threads)
    messages = finish(resumed)

    expected = read_checkpoint(StateDir(tmp_path / "whole"), "sft-1")
    got = read_checkpoint(StateDir(tmp_path / "broken"), "sft-1")
    assert expected is not None
    assert replace(got, saved_at=expected.saved_at) == expected
    assert got.saved_at > expected.saved_at - PATIENCE_S
    assert got.num_updates == NUM_UPDATES
    assert got.row_ids
    assert tuple(source.row_id for source in got.sources) == got.row_ids
    assert {(source.source_path, source.licence) for source in got.sources} == {("raw.jsonl", "mit")}
    assert got.weights_digest != read_checkpoint(StateDir(tmp_path / "broken"), "base-1").weights_digest
    # The second start continued from the last complete checkpoint of the first (that of update 15 may have been
    # incomplete when the process was killed), and reported how it ended.
    assert min(message["update"] for message in messages if message["kind"] == "metrics") > 10
    assert messages[-1]["result"]["weights_digest"] == got.weights_digest
    losses = 'SELECT "update", weights_id, loss, learning_rate FROM updates ORDER BY 1'
    assert rows_of(tmp_path / "broken", losses) == rows_of(tmp_path / "whole", losses)
    assert [row[0] for row in rows_of(tmp_path / "broken", losses)] == list(range(1, NUM_UPDATES + 1))
    attempts = rows_of(
        tmp_path / "broken", "SELECT status, first_update, num_planned FROM stage_attempts ORDER BY started_utc"
    )
    assert [status for status, _, _ in attempts] == ["running", "finished"], "a killed one cannot say that it ended"
    assert attempts[0][1] == 1
    assert attempts[1][1] in (11, 16)
    stages = rows_of(
        tmp_path / "broken", "SELECT status, num_updates, num_attempts, ended_utc > started_utc FROM stages"
    )
    assert stages == [("finished", NUM_UPDATES, 2, True)]
    names = {path.name for path in StateDir(tmp_path / "broken").checkpoints.iterdir()}
    assert names - {".sft-1.lock", ".base-1.lock"} == {"base-1", "sft-1"}
