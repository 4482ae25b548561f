"""Small raw sources by hand."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from osworld_pipeline.datasets.raw import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.domain.state import StateDir

SOURCES = {source.name: source for source in (*REPLAY_SOURCES, *TASK_SOURCES)}
CALL = 'Action: {what}\n<tool_call>{{"name":"computer_use","arguments":{arguments}}}</tool_call>'


def image_bytes(colour: int = 0, *, fmt: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (32, 32), (colour, 0, 0)).save(sink, fmt)
    return sink.getvalue()


def image_text(colour: int = 0) -> str:
    return base64.b64encode(image_bytes(colour)).decode()


def turn(arguments: dict[str, Any]) -> str:
    return CALL.format(what="go", arguments=json.dumps(arguments))


def record(task_id: str = "t1", **changes: Any) -> dict[str, Any]:
    fields = {
        "task_id": task_id,
        "messages": [
            {"role": "system", "content": "an old prompt"},
            {"role": "user", "content": "<image>\n[Task]\nType x."},
            {"role": "assistant", "content": turn({"action": "type", "text": "x"})},
            {"role": "user", "content": "<image>"},
            {"role": "assistant", "content": turn({"action": "terminate", "status": "success"})},
        ],
        "images": [image_text(1), image_text(2)],
        "reward": 1.0,
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def put_lines(state: StateDir, name: str, lines: list[Any], *, ending: str = "\n") -> Source:
    source = SOURCES[name]
    path = source.locate(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + ending)
    return source


def put_table(state: StateDir, name: str, rows: list[dict[str, Any]]) -> Source:
    path = SOURCES[name].locate(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return SOURCES[name]


def put_task(state: StateDir, config: dict[str, Any], *, domain: str = "os") -> Path:
    path = state.osworld_repo / "evaluation_examples" / "examples" / domain / f"{config['id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def config(task_id: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": task_id,
        "snapshot": "os",
        "instruction": f"Solve {task_id}.",
        "config": [],
        "related_apps": ["terminal"],
        "evaluator": {"func": "exact_match", "result": {}, "expected": {}},
    }
    return fields | changes
