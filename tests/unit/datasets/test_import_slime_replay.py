"""Slime-OSWorld's replay rows: reward, chunk and first dataset kept, images proven, a bad row named with its line."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from import_samples import OPTIONS, png, read_lines

from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

CALL = 'Action: Wait\n<tool_call>{"name":"computer_use","arguments":{"action":"wait"}}</tool_call>'


def row(**changes: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "Theirs."},
            {"role": "user", "content": "<image>\n[Task]\nDo it."},
            {"role": "assistant", "content": CALL},
        ],
        "images": [base64.b64encode(png(1)).decode()],
        "reward": 0.8,
        "task_id": "t",
        "num_steps": 1,
        "original_task_id": "t_chunk3",
        "source_dataset": "sft_hybrid",
        "quality_rank": 3,
    } | changes


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


def put(folder: Path, *rows: Any, name: str = "replay.jsonl") -> Path:
    text = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in rows).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder / name


def imported(state: StateDir, file: str = "demonstrations.jsonl") -> list[dict[str, Any]]:
    return read_lines(state.imports / "theirs" / file)


@pytest.mark.parametrize("name", ["replay.jsonl", "replay.jsonl.gz"])
def test_a_row_keeps_reward_chunk_and_first_dataset(state: StateDir, tmp_path: Path, name: str) -> None:
    summary = import_slime_replay(state, put(tmp_path, row(), name=name), OPTIONS)
    (record,) = imported(state)
    assert (record["task_id"], record["reward"], record["source_dataset"]) == ("t_chunk3", 0.8, "sft_hybrid")
    assert (record["source_path"], record["source_line"]) == (f"{name}#sft_hybrid", 1)
    assert record["images"] == [f"images/{digest_bytes(png(1))}.png"]
    assert (state.imports / "theirs" / record["images"][0]).read_bytes() == png(1)
    assert [part["type"] for part in record["messages"][1]["content"]] == ["image", "text"]
    assert summary.num_demonstrations == 1


def test_images_may_be_paths_relative_to_the_file(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(png(7))
    import_slime_replay(state, put(tmp_path, row(images=["shots/a.png"])), OPTIONS)
    assert imported(state)[0]["images"] == [f"images/{digest_bytes(png(7))}.png"]


@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        ("{", "malformed", "not JSON"),
        (row(messages="hello"), "malformed", "not a list"),
        (row(reward="much"), "malformed", "reward"),
        (row(images=[]), "bad_image", "1 image placeholders and 0 images"),
        (row(images=["AAAA"]), "bad_image", "image 0"),
        (row(images=[base64.b64encode(png(1)[:60]).decode()]), "bad_image", "image 0"),
        (row(messages=[*row()["messages"][:2], {"role": "assistant", "content": "Hm."}]), "dropped_parse", "turn 2"),
    ],
)
def test_a_bad_row_affects_no_other_row(state: StateDir, tmp_path: Path, bad: Any, kind: str, reason: str) -> None:
    import_slime_replay(state, put(tmp_path, row(), bad), OPTIONS)
    assert len(imported(state)) == 1
    (reject,) = imported(state, "rejects.jsonl")
    assert (reject["line"], reject["kind"]) == (2, kind)
    assert reason in reject["reason"]


def test_a_missing_file_is_reported(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no file"):
        import_slime_replay(state, tmp_path / "none.jsonl", OPTIONS)
