"""Train and test splits of an OSWorld tree, in the columns and JSON forms that Slime-OSWorld uses for training.

A hash of seed and id alone decides the split of a task. So a new, renamed or removed file moves no other task, and a
task in two folders cannot be in both splits. As a result, the share of the test split is close to the ratio, not equal
to it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from osworld_pipeline.atomic_io import parquet_bytes, remove_stale_temps, write_file
from osworld_pipeline.datasets.records import read_exactly
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError, TaskError

TRAIN_FILE, TEST_FILE, INDEX_FILE, REJECTS_FILE = "train.parquet", "test.parquet", "task_index.json", "rejects.parquet"
SAMPLES = pa.schema(
    [(name, pa.string()) for name in ("prompt", "images", "task_id", "domain", "instruction", "task_config")]
)
TASK_REJECTS = pa.schema([("source_path", pa.string()), ("reason", pa.string()), ("task_id", pa.string())])


@dataclass(frozen=True, kw_only=True)
class TaskReject:
    path: str
    """Relative to the examples folder."""
    reason: str
    task_id: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskSplit:
    train: tuple[Task, ...]
    test: tuple[Task, ...]
    """Both sorted by domain and id."""
    domains: tuple[str, ...]
    rejects: tuple[TaskReject, ...]


def split_tasks(
    osworld_path: Path, *, domains: Sequence[str] = (), test_ratio: float = 0.2, seed: int = 42
) -> TaskSplit:
    """Reads the tasks of the named domains, or of all. A domain is a folder of task files, named by its path below the
    examples (`chrome`, `Windows/ppt`); a folder of domains selects all of them. If two files of a domain have the same
    id, the one named after the id is kept, else the first by path.

    Raises:
        DatasetError: no examples folder, an unknown domain, a ratio outside 0..1, or no usable task.
    """
    if not 0.0 <= test_ratio <= 1.0:
        raise DatasetError(f"the test ratio is {test_ratio:g}, but must be a share from 0 to 1, usually 0.2")
    root = _examples_folder(osworld_path)
    chosen = _choose(root, domains)
    found: list[tuple[bool, Path, Task]] = []
    rejects: list[TaskReject] = []
    for path in _task_files(root, chosen, is_whole=not domains):
        try:
            task = _read_task(path, path.parent.relative_to(root).as_posix())
        except TaskError as error:
            rejects.append(TaskReject(path=path.relative_to(root).as_posix(), reason=str(error)))
        else:
            found.append((path.stem != task.task_id, path, task))
    tasks: dict[tuple[str, str], Task] = {}
    paths: dict[tuple[str, str], str] = {}
    for _, path, task in sorted(found, key=lambda item: (len(item[1].parts), item[0], item[1].as_posix())):
        name, identity = path.relative_to(root).as_posix(), (task.domain, task.task_id)
        if identity in tasks:
            reason = f"the id is already in {paths[identity]}"
            rejects.append(TaskReject(path=name, reason=reason, task_id=task.task_id))
            continue
        tasks[identity], paths[identity] = task, name
    if not tasks:
        raise DatasetError(
            f"none of the {len(rejects)} files in {root} is a task that can be run; check that it is an OSWorld tree"
        )
    ordered = sorted(tasks.values(), key=lambda task: (task.domain, task.task_id))
    is_test = {task_id: is_test_task(task_id, test_ratio=test_ratio, seed=seed) for _, task_id in tasks}
    return TaskSplit(
        train=tuple(task for task in ordered if not is_test[task.task_id]),
        test=tuple(task for task in ordered if is_test[task.task_id]),
        domains=tuple(chosen),
        rejects=tuple(sorted(rejects, key=lambda reject: reject.path)),
    )


def is_test_task(task_id: str, *, test_ratio: float, seed: int) -> bool:
    """Whether the hash of seed and id, read as a fraction, is below the ratio."""
    digest = hashlib.sha256(f"{seed}:{task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < test_ratio * 2**64


def write_split(split: TaskSplit, output_dir: Path) -> None:
    """Writes the four files atomically. The index is removed first and written last, so if it exists, the other files
    belong to it.

    Raises:
        StoreError: a file cannot be written.
    """
    remove_stale_temps(output_dir)
    (output_dir / INDEX_FILE).unlink(missing_ok=True)
    for name, tasks in ((TRAIN_FILE, split.train), (TEST_FILE, split.test)):
        rows = [_sample(task) for task in tasks]
        write_file(output_dir / name, parquet_bytes(pa.Table.from_pylist(rows, schema=SAMPLES)))
    rejects = [
        {"source_path": reject.path, "reason": reject.reason, "task_id": reject.task_id or None}
        for reject in split.rejects
    ]
    write_file(output_dir / REJECTS_FILE, parquet_bytes(pa.Table.from_pylist(rejects, schema=TASK_REJECTS)))
    index = {
        "train": [task.task_id for task in split.train],
        "test": [task.task_id for task in split.test],
        "domains": list(split.domains),
        "total_tasks": len(split.train) + len(split.test),
    }
    write_file(output_dir / INDEX_FILE, json.dumps(index, indent=2).encode())


def _examples_folder(osworld_path: Path) -> Path:
    for folder in (osworld_path / "evaluation_examples" / "examples", osworld_path / "evaluation_examples"):
        if folder.is_dir():
            return folder
    raise DatasetError(f"no evaluation_examples/examples in {osworld_path}: give the folder of an OSWorld checkout")


def _choose(root: Path, wanted: Sequence[str]) -> list[str]:
    """The domains by name; every folder that contains a JSON file is one."""
    there = sorted({path.parent.relative_to(root).as_posix() for path in root.rglob("*.json") if path.parent != root})
    if not wanted:
        return there
    chosen: set[str] = set()
    for name in wanted:
        found = {domain for domain in there if domain == name or domain.startswith(f"{name}/")}
        if not found:
            raise DatasetError(f"no domain '{name}' in {root}; there are: {', '.join(there) or 'none'}")
        chosen |= found
    return sorted(chosen)


def _task_files(root: Path, domains: Sequence[str], *, is_whole: bool) -> list[Path]:
    """Files of the domains and, for the whole tree, files in the root, which belong to no domain. `.json.nosetup` and
    similar files are not task files."""
    folders = [root / domain for domain in domains]
    return [path for folder in ([root] if is_whole else []) + folders for path in folder.glob("*.json")]


def _read_task(path: Path, domain: str) -> Task:
    try:
        config = read_exactly(read_regular_file(path))
    except (BadRecord, OSError) as error:
        raise TaskError(str(error)) from error
    if not isinstance(config, dict):
        raise TaskError("not a JSON object")
    return Task.from_config(config, domain=domain)


def _sample(task: Task) -> dict[str, Any]:
    """The row of Slime-OSWorld: prompt and images as JSON text, no internal keys, the folder as domain."""
    config = {key: value for key, value in task.config.items() if not key.startswith("_")}
    return {
        "prompt": json.dumps(task.task_id),
        "images": "[]",
        "task_id": task.task_id,
        "domain": task.domain,
        "instruction": task.instruction,
        "task_config": json.dumps(config | {"domain": task.domain}),
    }
