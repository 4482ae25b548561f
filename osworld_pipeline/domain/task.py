"""A task: one OSWorld problem, read from its JSON file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.errors import TaskError

BUILT_IN_SUITES = ("desktop-basics", "desktop-shortcuts", "windows-basics", "wine-basics")
SUITE_OF_TASK = f"^({'|'.join(BUILT_IN_SUITES)})-[a-z0-9_]+-[0-9]+$"
FAMILY_OF_TASK = f"^(?:{'|'.join(BUILT_IN_SUITES)})-([a-z0-9_]+)-[0-9]+$"
"""Task ids of a built-in suite have the form <suite>-<family>-<number>; other ids may match. DuckDB uses it too."""


@dataclass(frozen=True, kw_only=True)
class Task:
    task_id: str
    instruction: str
    domain: str
    """OSWorld's folder name (os, chrome, ...); `related_apps[0]` if unknown."""
    config: Mapping[str, Any]
    """The whole task file: id, instruction, config[], related_apps, evaluator{func, result, expected, ...}."""

    @property
    def config_digest(self) -> str:
        return digest_json(self.config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, domain: str | None = None) -> "Task":
        """Checks that a task has all that is needed to run and score it.

        Raises:
            TaskError: no id, no instruction, or no evaluator with a `func`.
        """
        task_id = config.get("id")
        if not isinstance(task_id, str) or not task_id:
            raise TaskError(f"the task has no string 'id' (keys: {', '.join(sorted(map(str, config)))})")
        instruction = config.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip():
            raise TaskError(f"task {task_id} has no instruction")
        evaluator = config.get("evaluator")
        if not isinstance(evaluator, Mapping) or not evaluator.get("func"):
            raise TaskError(f"task {task_id} has no evaluator with a 'func': it cannot be scored, so it cannot be run")
        apps = config.get("related_apps") or []
        fallback = apps[0] if isinstance(apps, list) and apps and isinstance(apps[0], str) else "unknown"
        return cls(task_id=task_id, instruction=instruction, domain=domain or fallback, config=dict(config))


def family_of_task(task_id: str, domain: str = "") -> str:
    """The family of a task of a built-in suite, else the domain; may be empty."""
    match = re.search(FAMILY_OF_TASK, task_id)
    return match[1] if match else domain
