"""AgentNet (recorded human trajectories: JSONL and a folder of screenshots) as demonstrations.

Its points are fractions of the screen. Its steps have pyautogui code and AgentNet's own calls (`computer.terminate`).
The published files add text of a model: thought and action of each step, and whether it judges the task completed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.datasets.importers.calls import Pointer, ToPixels, actions_of, read_code
from osworld_pipeline.datasets.importers.folder import (
    ImportOptions,
    ImportSummary,
    ImportWriter,
    open_import,
    publish,
)
from osworld_pipeline.datasets.importers.images import ProvenImage, read_image
from osworld_pipeline.datasets.importers.lines import Line, OnProgress, read_lines
from osworld_pipeline.datasets.importers.turns import Conversation
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, DatasetError

IMPORTER = "agentnet"
FAILED_REWARD = 0.0
"""Reward of a task that the published file marks as not completed."""


def import_agentnet(
    state: StateDir,
    path: Path,
    options: ImportOptions,
    *,
    images: Path | None = None,
    on_progress: OnProgress | None = None,
) -> ImportSummary:
    """`path`: a JSONL file, or a folder of such files; `images`: the folder of the screenshots; default: `images/` next
    to each file.

    Raises:
        DatasetError: no such file, bad options, or another import runs.
        StoreError: the file system refused.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DatasetError(f"no JSONL file at {path}: give an AgentNet file, or the folder that holds it")
    with open_import(state, importer=IMPORTER, origin=str(path), options=options) as writer:
        for file in files:
            folder = images or file.parent / "images"
            for line in read_lines(file, on_progress):
                _import_line(writer, line, file.name, folder)
        summary = writer.finish(num_episodes=0)
        publish(state, writer)
    return summary


def _import_line(writer: ImportWriter, line: Line, path: str, folder: Path) -> None:
    task_id = ""
    try:
        if line.record is None:
            raise BadRecord(kind="malformed", reason=line.reason)
        task = _task(line.record)
        task_id = task.task_id
        conversation, images = _conversation(task, _steps(line.record), folder)
    except BadRecord as bad:
        writer.add_reject(bad, path=path, line=line.number, task_id=task_id)
        return
    for image in images.values():
        writer.add_image(image)
    writer.add_task(task_id=task_id, instruction=task.instruction, domain=task.domain)
    writer.add_demonstration(
        task_id=task_id,
        messages=conversation.messages,
        images=conversation.images,
        reward=FAILED_REWARD if line.record.get("task_completed") is False else None,
        source_path=path,
        source_line=line.number,
    )


def _task(record: Mapping[str, Any]) -> Task:
    """Prefers the person's instruction to the model's."""
    task_id = record.get("task_id")
    if not isinstance(task_id, str) or not task_id:
        raise BadRecord(kind="malformed", reason="no task_id")
    words = (record.get(key) for key in ("instruction", "natural_language_task", "actual_task"))
    instruction = next((text.strip() for text in words if isinstance(text, str) and text.strip()), None)
    if instruction is None:
        raise BadRecord(kind="malformed", reason=f"task {task_id[:80]} has no instruction")
    named = (record.get(key) for key in ("domain", "platform", "system"))
    domain = next((text for text in named if isinstance(text, str) and text), "")
    return Task(task_id=task_id, instruction=instruction, domain=domain, config={})


def _steps(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    steps = record.get("traj")
    if not isinstance(steps, list) or not steps:
        raise BadRecord(kind="malformed", reason="no steps at traj")
    for index, step in enumerate(steps):
        value = step.get("value") if isinstance(step, dict) else None
        if not isinstance(value, dict) or not isinstance(value.get("code"), str):
            raise BadRecord(kind="malformed", reason=f"step {index} has no code at value.code")
    return steps


def _conversation(
    task: Task, steps: list[Mapping[str, Any]], folder: Path
) -> tuple[Conversation, dict[str, ProvenImage]]:
    conversation, pointer = Conversation(task=task), Pointer()
    images: dict[str, ProvenImage] = {}
    for index, step in enumerate(steps):
        value = step["value"]
        try:
            image = read_image(folder, step.get("image"))
        except DatasetError as error:
            raise BadRecord(kind="bad_image", reason=f"step {index}: {error}") from error
        try:
            actions = actions_of(read_code(value["code"]), _on_image(image), pointer)
            if index < len(steps) - 1 and actions[-1]["action"] == "terminate":
                raise ActionParseError("the task ends before the last step")
        except ActionParseError as error:
            raise BadRecord(kind="dropped_parse", reason=f"step {index}: {error}") from error
        images[image.name] = image
        words = (value.get(key) for key in ("action", "thought"))
        said = next((text for text in words if isinstance(text, str) and text.strip()), "")
        conversation.add_step(image.name, actions, said=said)
    return conversation, images


def _on_image(image: ProvenImage) -> ToPixels:
    def to_pixels(x: float, y: float) -> tuple[int, int]:
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise ActionParseError(f"the point ({x:g}, {y:g}) is not on the screen, whose coordinates are from 0 to 1")
        return min(round(x * image.width), image.width - 1), min(round(y * image.height), image.height - 1)

    return to_pixels
