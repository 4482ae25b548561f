"""The JSON of a task stays unchanged: no table requires a field to have one type in all tasks."""

import json
from pathlib import Path
from typing import Any

import pytest
from raw_samples import config, put_lines, put_table, put_task, record

from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.owned import read_table

RULE = {"type": "rule", "rules": {"expected": "x"}}
SHAPES: dict[str, dict[str, Any]] = {
    "scalars": config("scalars", evaluator={"func": "exact_match", "result": {"type": "vm_file"}, "expected": RULE}),
    "lists": config(
        "lists",
        evaluator={"func": ["exact_match"] * 2, "result": [{"type": "vm_file"}] * 2, "expected": [RULE, None]},
        config=[{"type": "sleep", "parameters": {"seconds": 1}}, {"type": "launch", "parameters": {"command": ["a"]}}],
    ),
    "mixed": config("mixed", evaluator={"func": ["a", "b"], "result": {"type": "x"}, "expected": [{}, "text", 3]}),
    "bare": {name: value for name, value in config("bare").items() if name not in ("config", "snapshot")},
}


@pytest.mark.parametrize("where", ["tree", "table"])
def test_tasks_whose_fields_differ_in_type_come_back_unchanged(tmp_path: Path, where: str) -> None:
    state = StateDir(tmp_path)
    if where == "tree":
        for one in SHAPES.values():
            put_task(state, one)
    else:
        put_table(
            state,
            "distill_train",
            [{"task_id": name, "domain": "os", "task_config": json.dumps(one)} for name, one in SHAPES.items()],
        )
    put_lines(state, "sft_clean", [record(name) for name in SHAPES])
    build_union_tables(state, system_prompt="p")
    rows = {row["task_id"]: row for row in read_table(state, "union_tasks").to_pylist()}
    assert {name: json.loads(rows[name]["task_config"]) for name in SHAPES} == SHAPES
    assert set(read_table(state, "train_tasks").column("task_id").to_pylist()) == set(SHAPES)
