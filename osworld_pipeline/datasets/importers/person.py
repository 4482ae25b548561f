"""Demonstrations that people recorded here, as one import that grows: each is added to those before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.datasets.importers.folder import (
    ImportOptions,
    ImportSummary,
    ImportWriter,
    open_import,
    publish,
)
from osworld_pipeline.datasets.importers.images import prove_image
from osworld_pipeline.datasets.imports import DEMONSTRATIONS, SOURCE_FILE, TASKS
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError

IMPORTER = "person"


def check_person_import(state: StateDir, options: ImportOptions) -> None:
    """
    Raises:
        DatasetError: the import of that name is not one of people's demonstrations, has another licence, or is
            damaged.
    """
    path = state.imports / options.name / SOURCE_FILE
    if not path.is_file():
        return
    found = _read_note(path)
    if found.get("importer") != IMPORTER:
        raise DatasetError(f"import {options.name} was made by {found.get('importer')}: choose another name")
    if found.get("licence") != options.licence:
        raise DatasetError(
            f"the demonstrations in import {options.name} have the licence {found.get('licence')!r}, not "
            f"{options.licence!r}: give the licence of the import, or choose another name"
        )


def add_demonstration(
    state: StateDir, task: Task, demonstration: Demonstration, options: ImportOptions, *, provenance: Mapping[str, Any]
) -> ImportSummary:
    """`provenance`: fields of the record, among them `person` and `episode_id`.

    Raises:
        DatasetError: as check_person_import, or another import runs.
        StoreError: the file system refused; the import is as before.
    """
    with open_import(state, importer=IMPORTER, origin="demonstrations by people", options=options) as writer:
        check_person_import(state, options)
        _keep(writer, state.imports / options.name)
        images = [prove_image(data) for data in demonstration.images]
        for image in images:
            writer.add_image(image)
        writer.add_task(task_id=task.task_id, instruction=task.instruction, domain=task.domain, config=task.config)
        writer.add_demonstration(
            task_id=task.task_id,
            messages=demonstration.messages,
            images=[image.name for image in images],
            reward=demonstration.reward,
            source_path=f"person/{provenance['person'] or 'unnamed'}/{provenance['episode_id']}",
            source_line=1,
            extra=provenance,
        )
        summary = writer.finish(num_episodes=0)
        publish(state, writer)
    return summary


def _keep(writer: ImportWriter, before: Path) -> None:
    """Adds everything of the import as it was."""
    if not (before / SOURCE_FILE).is_file():
        return
    for path in sorted((before / "images").iterdir()):
        writer.add_image(prove_image(path.read_bytes(), path=path))
    for record in _records(before / TASKS):
        config = record["task_config"]
        writer.add_task(
            task_id=record["task_id"],
            instruction=record["instruction"],
            domain=record["domain"],
            config=None if config is None else orjson.loads(config),
        )
    for record in _records(before / DEMONSTRATIONS):
        known = {name: record.pop(name) for name in ("task_id", "messages", "images", "source_path", "source_line")}
        writer.add_demonstration(**known, reward=record.pop("reward", None), extra=record)


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_note(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DatasetError:
    return DatasetError(f"{path} is damaged ({error}): remove its folder, or give another name")
