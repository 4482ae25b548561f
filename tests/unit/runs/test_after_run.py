"""What a program does after it has succeeded."""

import json
from pathlib import Path

import pytest
from episode_samples import make_episode

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.__main__ import run_program
from osworld_pipeline.runs.messages import Message, Result
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import take_snapshot

PROGRAM = """
def main(job, report):
    return {}
"""


@pytest.mark.parametrize(("rank", "num_left"), [("0", 0), ("1", 9)])
def test_the_small_parts_that_a_program_leaves_are_merged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, num_left: int
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RANK", rank)
    state = StateDir(tmp_path / "state")
    store = TrajectoryStore(state)
    for number in range(9):
        store.write_episodes(f"p{number}", [make_episode(f"p{number}")])
    reported: list[Message] = []
    assert run_program("own.program", json.loads(json.dumps({"state_root": str(state.root)})), reported.append) == 0
    assert reported == [Result(result={})]
    assert len(take_snapshot(state.trajectories, "episodes").small) == num_left
    assert len(store.read_parts(store.existing_parts())) == 9
