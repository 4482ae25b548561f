"""Demonstrations by people: one import that grows, each whole or absent."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from import_samples import png, read_lines

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.datasets.importers import ImportOptions
from osworld_pipeline.datasets.importers.person import add_demonstration, check_person_import
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError, StoreError

OPTIONS = ImportOptions(name="person", licence="CC0-1.0")
DONE = {"action": "terminate", "status": "success"}


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


def task(name: str) -> Task:
    return Task.from_config(
        {"id": name, "instruction": f"Do {name}.", "evaluator": {"func": "infeasible"}}, domain="os"
    )


def played(name: str, shade: int = 0) -> Demonstration:
    turns = (
        system_message("You act."),
        user_message("[Task]"),
        assistant_message(load_dialect("slime").format("End", DONE)),
    )
    return Demonstration(task_id=name, messages=turns, images=(png(shade),), reward=1.0)


def add(state: StateDir, name: str, shade: int = 0, options: ImportOptions = OPTIONS) -> Any:
    provenance = {"source": "person", "person": "alice", "episode_id": f"e-{name}", "server": "http://here"}
    return add_demonstration(state, task(name), played(name, shade), options, provenance=provenance)


def test_a_demonstration_is_added_to_those_before_it(state: StateDir) -> None:
    assert add(state, "one", 1).num_demonstrations == 1
    before = read_lines(state.imports / "person" / "demonstrations.jsonl")
    summary = add(state, "two", 2)
    assert (summary.importer, summary.num_demonstrations, summary.num_tasks) == ("person", 2, 2)
    first, second = read_lines(state.imports / "person" / "demonstrations.jsonl")
    assert [first] == before
    assert (second["source"], second["person"], second["server"]) == ("person", "alice", "http://here")
    assert second["source_path"] == "person/alice/e-two"
    for record, shade in ((first, 1), (second, 2)):
        assert (state.imports / "person" / record["images"][0]).read_bytes() == png(shade)
    tasks = read_lines(state.imports / "person" / "tasks.jsonl")
    assert [orjson.loads(one["task_config"])["id"] for one in tasks] == ["one", "two"]


def test_another_licence_and_an_import_of_another_kind_are_refused(state: StateDir) -> None:
    add(state, "one")
    other = ImportOptions(name="person", licence="MIT")
    with pytest.raises(DatasetError, match=r"have the licence 'CC0-1.0', not 'MIT'"):
        add(state, "two", options=other)
    note = state.imports / "person" / "source.json"
    note.write_bytes(orjson.dumps({**orjson.loads(note.read_bytes()), "importer": "agentnet"}))
    with pytest.raises(DatasetError, match="was made by agentnet: choose another name"):
        check_person_import(state, OPTIONS)
    assert len(read_lines(state.imports / "person" / "demonstrations.jsonl")) == 1


def test_the_next_program_removes_what_a_killed_program_left(state: StateDir) -> None:
    add(state, "one", 1)
    left = state.imports / ".person.new"
    left.mkdir()
    (left / "demonstrations.jsonl").write_bytes(b'{"task_id": "half')
    add(state, "two", 2)
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", "person"]
    assert len(read_lines(state.imports / "person" / "demonstrations.jsonl")) == 2


def test_a_damaged_import_is_named_and_not_replaced(state: StateDir) -> None:
    add(state, "one")
    (state.imports / "person" / "demonstrations.jsonl").write_bytes(b"{half\n")
    with pytest.raises((DatasetError, StoreError), match="is damaged"):
        add(state, "two")
    assert (state.imports / "person" / "demonstrations.jsonl").read_bytes() == b"{half\n"
