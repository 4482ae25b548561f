"""SFT as a process of its own, killed without warning and started again."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.runs.sft import train_sft
from osworld_pipeline.runs.sft.job import SftJob
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.owned import write_table

NUM_UPDATES = 30
PATIENCE_S = 120.0


def prepare(root: Path) -> dict[str, Any]:
    """A state folder with a base checkpoint and eight demonstrations; the job that trains on them."""
    recipe = load_recipe("smoke").model_dump(mode="json")
    recipe["model"] |= {"hidden_size": 32, "num_layers": 1, "vision_hidden_size": 32, "vocab_size": 400}
    recipe["sft"] |= {"num_updates": NUM_UPDATES, "save_every": 5, "batch_size": 4}
    recipe["trainer"] |= {"num_threads": 1}
    state = StateDir(root)
    job = {"recipe": recipe, "state_root": str(root), "data_digest": "d"}
    made = StageJob.model_validate({**job, "stage": "base", "checkpoint_id": "base-1"})
    base = make_base.main(made, lambda message: None)
    blobs, dialect = BlobStore(state.blobs), load_dialect("slime")
    rows = []
    for number in range(8):
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (number * 30, 90, 200)).save(buffer, format="PNG")
        answer = dialect.format("Done", {"action": "terminate", "status": "success"})
        messages = [
            system_message("You operate a computer."),
            user_message(f"[Task]\nDo {number}"),
            assistant_message(answer),
        ]
        rows.append(
            {
                "row_id": f"row{number}",
                "task_id": f"task{number}",
                "original_task_id": f"task{number}",
                "source_dataset": "sft_clean",
                "source_path": "raw.jsonl",
                "licence": "mit",
                "reward": 1.0,
                "num_steps": 1,
                "messages": [
                    {
                        "role": item["role"],
                        "content": [{"type": part["type"], "text": part.get("text")} for part in item["content"]],
                    }
                    for item in messages
                ],
                "images": [blobs.write(buffer.getvalue(), suffix="png")],
            }
        )
    write_table(state, "replay_buffer", rows)
    parent = {"checkpoint_id": base["checkpoint_id"], "path": base["path"]}
    return {**job, "stage": "sft", "checkpoint_id": "sft-1", "parent": parent}


def start(job: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "osworld_pipeline.runs", "train_sft", "--print"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    return process


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def kill_at(process: subprocess.Popen[str], kind: str, update: int) -> None:
    """SIGKILL as soon as the process has reported that."""
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
    # The second start went on from the last whole checkpoint of the first (that of update 15 may have been in the
    # writing when the process was killed), and said how it ended.
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
