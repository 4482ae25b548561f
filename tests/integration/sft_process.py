"""A small stage of SFT as a process of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.store import BlobStore
from osworld_pipeline.tables.owned import write_table

NUM_UPDATES = 30
PATIENCE_S = 120.0


def prepare(root: Path) -> dict[str, Any]:
    """Makes a state folder with a base checkpoint and eight demonstrations. Returns the job that trains on them."""
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


def start(job: dict[str, Any], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "osworld_pipeline.runs", "train_sft", "--print"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
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
