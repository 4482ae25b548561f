"""The replay file that a recipe names is a source as long as a recipe names it."""

import json
import os
from pathlib import Path

import pytest

from osworld_pipeline.datasets.imports import find_imports
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.runs.sources.replay_import import NAME, sync_replay_import

RECORD = {
    "task_id": "t1",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "[Task]\nDo it."},
        {
            "role": "assistant",
            "content": 'Action: wait\n<tool_call>{"name":"computer_use","arguments":{"action":"wait"}}</tool_call>',
        },
    ],
    "images": [],
    "reward": 1.0,
}


def write(path: Path, num_records: int) -> str:
    path.write_text("".join(json.dumps({**RECORD, "task_id": f"t{index}"}) + "\n" for index in range(num_records)))
    return str(path)


def num_demonstrations(state: StateDir) -> int:
    (one,) = [one for one in find_imports(state.imports)[0] if one.folder.name == NAME]
    return len((one.folder / "demonstrations.jsonl").read_text().splitlines())


def test_file_is_imported_once_and_again_when_it_changes(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    path = write(tmp_path / "osworld_replay_train.jsonl", 1)
    assert sync_replay_import(state, path)
    assert num_demonstrations(state) == 1
    assert not sync_replay_import(state, path), "nothing has changed"
    write(tmp_path / "osworld_replay_train.jsonl", 2)
    os.utime(path, (1, 1))
    assert sync_replay_import(state, path)
    assert num_demonstrations(state) == 2


def test_file_that_no_recipe_names_any_more_is_not_a_source(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    sync_replay_import(state, write(tmp_path / "replay.jsonl", 1))
    assert not sync_replay_import(state, None)
    assert find_imports(state.imports) == ([], [])


def test_missing_file_is_refused_with_the_names_of_key_and_variable(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"replay.import_file \(OSWORLD_REPLAY_BUFFER\) names .*gone.jsonl"):
        sync_replay_import(StateDir(tmp_path / "var"), str(tmp_path / "gone.jsonl"))
