"""Task files: OSWorld's JSON, a tree of them, and tables of them in Parquet."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.parser import Parser, scratch_folder
from osworld_pipeline.datasets.raw import RawTask, read_tasks_at
from osworld_pipeline.datasets.records import read_object
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.datasets.sources import TASK_SOURCES
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError
from osworld_pipeline.task_schema.reading import check_task, read_grader

TREE = next(source for source in TASK_SOURCES if source.kind == "task_tree")
TABLE = next(source for source in TASK_SOURCES if source.kind == "task_table" and source.has_config)
TASK = {
    "id": "t-1",
    "instruction": "Rename it.",
    "related_apps": ["os"],
    "config": [
        {"type": "launch", "parameters": {"command": ["xterm"]}},
        {"type": "download", "parameters": {"files": [{"url": "https://example.com/a", "path": "/tmp/a"}]}},
    ],
    "evaluator": {
        "func": "check_include_exclude",
        "result": {"type": "vm_command_line", "command": ["ls"]},
        "expected": {"type": "rule", "rules": {"include": ["a"], "exclude": []}},
        "postconfig": [{"type": "sleep", "parameters": {"seconds": 1}}],
    },
}
SEVERAL = TASK | {
    "evaluator": {
        "func": ["exact_match", "compare_text_file"],
        "conj": "or",
        "result": [
            {"type": "vm_command_line", "command": "ls", "shell": True},
            {"type": "vm_file", "path": "/a", "dest": "a"},
        ],
        "expected": [
            {"type": "rule", "rules": {"expected": "x"}},
            {"type": "vm_file", "path": "/b", "dest": "b"},
        ],
        "options": [{}, {"ignore_case": True}],
    }
}


def _check(data: bytes) -> None:
    task = Task.from_config(read_object(data))
    assert len(task.config_digest) == 64
    if not check_task(task):
        read_grader(task.task_id, task.config["evaluator"])


def _tree(data: bytes) -> None:
    with scratch_folder() as folder:
        (folder / "os").mkdir()
        (folder / "os" / "t.json").write_bytes(data)
        _need_a_task(list(read_tasks_at(TREE, folder)))


def _table(data: bytes) -> None:
    with scratch_folder() as folder:
        path = folder / "tasks.parquet"
        path.write_bytes(data)
        _need_a_task(list(read_tasks_at(TABLE, path)))


def _need_a_task(found: list[object]) -> None:
    if not any(isinstance(one, RawTask) for one in found):
        raise BadRecord("no task")


def table_of(rows: list[dict[str, object]], *, compression: str = "none") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, compression=compression)
    return buffer.getvalue()


ROWS: list[dict[str, object]] = [
    {"task_id": "t-1", "task_config": json.dumps(TASK), "domain": "os"},
    {"task_id": "t-2", "task_config": None, "domain": None},
]
SEEDS = (json.dumps(TASK).encode(), json.dumps(SEVERAL).encode())

PARSERS = [
    Parser(name="task", read=_check, refusals=(TaskError, BadRecord), seeds=SEEDS),
    Parser(name="task_tree", read=_tree, refusals=(BadRecord,), seeds=SEEDS),
    Parser(
        name="task_table",
        read=_table,
        refusals=(BadRecord,),
        seeds=(table_of(ROWS), table_of(ROWS, compression="snappy")),
    ),
]
