"""Values that JSON allows and that a reader, a writer or a table cannot hold: each is a reject; no build ends early."""

import json
from pathlib import Path
from typing import Any

import pytest
from raw_samples import config, put_lines, put_table, put_task, record

from osworld_pipeline.datasets.artefacts import write_union_artefacts
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.owned import read_table

HUGE = int("9" * 401)


def nested(depth: int, kind: type = list) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def with_content(value: Any) -> dict[str, Any]:
    messages = record()["messages"]
    return record("bad", messages=[*messages[:-1], {**messages[-1], "extra": value}])


RECORDS = {
    "a huge reward": record("bad", reward=HUGE),
    "a huge reward below zero": record("bad", reward=-HUGE),
    "a huge number in a turn": with_content(HUGE),
    "deep lists in a turn": with_content(nested(600)),
    "deep objects in a turn": with_content(nested(600, dict)),
    "deeper than any reader": with_content(nested(3000)),
    "deep metadata": record("bad", metadata=nested(600)),
    "deep images": record("bad", images=nested(600)),
    "a deep id": record(nested(600)),
    "deep content": record("bad", messages=[{"role": "user", "content": nested(600)}, record()["messages"][4]]),
    "a huge part": record("bad", messages=[{"role": "user", "content": [HUGE]}, record()["messages"][4]]),
}


def lines() -> list[str]:
    import sys

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return [json.dumps(value) for value in RECORDS.values()]
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("line", lines(), ids=RECORDS)
def test_a_record_with_a_hostile_value_does_not_end_the_build(tmp_path: Path, line: str) -> None:
    state = StateDir(tmp_path)
    put_lines(state, "bc_sft", [record("good", messages=record()["messages"]), line])
    build_union_tables(state, system_prompt="p", num_workers=0)
    assert read_table(state, "replay_buffer").column("task_id").to_pylist()[0] == "good"
    write_union_artefacts(state.datasets, state.osworld_repo, tmp_path / "out", system_prompt="p", num_workers=0)
    first = json.loads((tmp_path / "out" / "osworld_replay_train.jsonl").read_text().splitlines()[0])
    assert first["task_id"] == "good"


@pytest.mark.parametrize(
    "extra", [HUGE, nested(600), nested(900, dict)], ids=["a huge number", "deep lists", "deep objects"]
)
def test_a_config_with_a_hostile_value_does_not_end_the_build(tmp_path: Path, extra: Any) -> None:
    state = StateDir(tmp_path)
    put_lines(state, "bc_sft", [record("good"), record("tree"), record("table")])
    put_task(state, config("good"))
    put_task(state, config("tree", extra=extra))
    put_table(state, "distill_train", [{"task_id": "table", "task_config": json.dumps(config("table", extra=extra))}])
    build_union_tables(state, system_prompt="p", num_workers=0)
    assert "good" in read_table(state, "train_tasks").column("task_id").to_pylist()
    write_union_artefacts(state.datasets, state.osworld_repo, tmp_path / "out", system_prompt="p", num_workers=0)
