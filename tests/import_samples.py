"""Origins of imports as they are found: OSWorld result folders in every state, AgentNet files, replay JSONL."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from osworld_pipeline.datasets.importers import ImportOptions

OPTIONS = ImportOptions(name="theirs", licence="MIT", revision="r1", quality_rank=2)
DONE = "DONE"


def png(shade: int, size: tuple[int, int] = (64, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256, 10, 20)).save(buffer, format="PNG")
    return buffer.getvalue()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def put_task(osworld: Path, task_id: str, domain: str = "os", **changes: Any) -> None:
    config = {"id": task_id, "instruction": f"Do {task_id}.", "evaluator": {"func": "exact_match"}} | changes
    path = osworld / "evaluation_examples" / "examples" / domain / f"{task_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))


def put_attempt(
    results: Path,
    task_id: str,
    actions: Sequence[Any],
    *,
    result: str | None = "1.0\n",
    model: str = "some-model",
    first_screen: bool = True,
    domain: str = "os",
    **row_changes: Any,
) -> Path:
    """Writes an attempt as OSWorld's runner does: the screenshot of a row is the screen after its action."""
    folder = results / "pyautogui" / "screenshot" / model / domain / task_id
    folder.mkdir(parents=True)
    rows = []
    for number, action in enumerate(actions, 1):
        name = f"step_{number}_20250102@0304{number:02d}.png"
        (folder / name).write_bytes(png(number))
        row = {
            "step_num": number,
            "action_timestamp": f"20250102@0304{number:02d}",
            "action": action,
            "response": f"I see it.\n```python\n{action}\n```",
            "reward": 0,
            "done": action in ("DONE", "FAIL"),
            "info": {},
            "screenshot_file": name,
        }
        rows.append(row | row_changes)
    if first_screen:
        (folder / "step_0_20250102@030400.png").write_bytes(png(0))
    (folder / "traj.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if result is not None:
        (folder / "result.txt").write_text(result)
    return folder


def agentnet_record(task_id: str, codes: Sequence[str], **changes: Any) -> dict[str, Any]:
    steps = [{"index": i, "image": f"{i}.png", "value": {"code": code}} for i, code in enumerate(codes)]
    return {"task_id": task_id, "instruction": f"Do {task_id}.", "traj": steps} | changes


def put_agentnet(folder: Path, records: Sequence[Any], *, size: tuple[int, int] = (200, 100)) -> Path:
    (folder / "images").mkdir(parents=True)
    for number in range(8):
        (folder / "images" / f"{number}.png").write_bytes(png(number, size))
    path = folder / "some.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path
