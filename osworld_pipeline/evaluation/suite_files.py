"""Suites of evaluations: named lists of tasks with a digest. They are a recipe's own held-out tasks, OSWorld's
published lists and domains, and the user's files.

A suite file, `<state>/suites/<name>.json`, is a list of tasks in OSWorld's format, or an object with that list under
`tasks`; a task may also be the path of its file, relative to the suite's. Its tasks are validated: an unknown verb,
getter, metric or rule is refused by name. A name that exists only in OSWorld's desktop-env is accepted with a warning,
because the graders depend on the env server.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import DatasetError, TaskError
from osworld_pipeline.task_schema.reading import check_task

log = logging.getLogger(__name__)

OSWORLD = "osworld"
HELDOUT = "heldout"
"""The held-out tasks of the recipe's own suite."""
DOMAINS = (
    "chrome", "gimp", "libreoffice_calc", "libreoffice_impress", "libreoffice_writer", "multi_apps", "os",
    "thunderbird", "vlc", "vs_code",
)  # fmt: skip
SUITE_NAME = re.compile(r"[A-Za-z0-9._-]+")
"""Characters that Dagster's partition keys allow."""


@dataclass(frozen=True, kw_only=True)
class EvalSuite:
    name: str
    tasks: tuple[Task, ...]
    """Distinct by domain and id."""
    digest: str
    """Digest of every task as it is run and scored."""
    origin: str = ""
    """Origin of the tasks: a built-in suite, osworld, or the name of the user's suite."""

    def name_of(self, task: Task) -> str:
        """Name of a task in this suite: its id, with the domain if several domains have a task with that id."""
        is_shared = sum(one.task_id == task.task_id for one in self.tasks) > 1
        return f"{task.domain}/{task.task_id}" if is_shared else task.task_id

    def id_of(self, task: Task) -> str:
        """Its name in ids of episodes and groups, which name files."""
        return re.sub("[^A-Za-z0-9._-]", "_", self.name_of(task))


@dataclass(frozen=True, kw_only=True)
class PublishedList:
    """One of OSWorld's lists: an index file, `{domain: [ids]}`, or the whole folder without one."""

    index: str | None
    folder: str = "examples"
    domain: str | None = None


OSWORLD_SUITES: Mapping[str, PublishedList] = MappingProxyType(
    {
        "osworld-test_small": PublishedList(index="test_small.json"),
        "osworld-test_all": PublishedList(index="test_all.json"),
        **{f"osworld-{domain}": PublishedList(index="test_all.json", domain=domain) for domain in DOMAINS},
        "osworld-windows": PublishedList(index=None, folder="examples/Windows"),
    }
)


def suite_names(folder: Path) -> tuple[str, ...]:
    """The names of all suites; `folder` has the user's.

    Raises:
        DatasetError: a file's name is invalid for a suite, or that of a built-in one.
    """
    own = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    for name in own:
        if not SUITE_NAME.fullmatch(name):
            raise DatasetError(f"{folder / name}.json: a suite's name may have letters, digits, '.', '_' and '-' only")
        if name == HELDOUT or name in OSWORLD_SUITES:
            raise DatasetError(f"{folder / name}.json: '{name}' is the name of a built-in suite; choose another")
    return (HELDOUT, *OSWORLD_SUITES, *own)


def read_osworld_suite(name: str, root: Path) -> EvalSuite:
    """`root`: an OSWorld checkout.

    Raises:
        DatasetError: there is no checkout, or a task of the list is missing or cannot be scored.
    """
    wanted = OSWORLD_SUITES[name]
    examples = root / "evaluation_examples" / wanted.folder
    if wanted.index is None:
        paths = sorted(examples.glob("*/*.json"))
    else:
        index = _read_json(
            examples.parent / wanted.index,
            what_to_do=f"put an OSWorld checkout at {root} (git clone https://github.com/xlang-ai/OSWorld {root})",
        )
        domains = [wanted.domain] if wanted.domain else sorted(index)
        paths = [examples / domain / f"{task_id}.json" for domain in domains for task_id in index.get(domain, ())]
    if not paths:
        raise DatasetError(f"suite {name}: {examples} has none of its tasks; check that the checkout is complete")
    tasks = [_read_task(path, domain=path.parent.name) for path in paths]
    return _suite(name, tasks, origin=OSWORLD)


def read_suite_file(path: Path) -> EvalSuite:
    """
    Raises:
        DatasetError: no such suite, or one of its tasks cannot be read, set up or scored, or is a duplicate; names it.
    """
    document = _read_json(path, what_to_do="write a list of tasks in OSWorld's format to it, or name another suite")
    entries = document.get("tasks") if isinstance(document, Mapping) else document
    if not isinstance(entries, list) or not entries:
        raise DatasetError(f"{path} is not a suite: it has no list of tasks")
    tasks = []
    osworlds: dict[str, str] = {}
    for number, entry in enumerate(entries, start=1):
        file = path.parent / entry if isinstance(entry, str) else None
        where = f"{path}, task {number}" if file is None else str(file)
        task = _task(entry, where) if file is None else _read_task(file)
        for word in _checked_words(task, where):
            osworlds.setdefault(word, task.task_id)
        tasks.append(task)
    if osworlds:
        listed = ", ".join(f"{word} (task {task_id})" for word, task_id in osworlds.items())
        log.warning(
            "suite %s uses features of OSWorld's desktop-env: %s. Env servers without --grader osworld or "
            "--provider desktop_env refuse these tasks.", path.stem, listed,
        )  # fmt: skip
    return _suite(path.stem, tasks, origin=path.stem)


def first_tasks(suite: EvalSuite, num_tasks: int) -> EvalSuite:
    """The first tasks as a separate suite: an evaluation of a part is never ranked with one of the whole."""
    if num_tasks >= len(suite.tasks):
        return suite
    return _suite(f"{suite.name}-first-{num_tasks}", suite.tasks[:num_tasks], origin=suite.origin)


def _suite(name: str, tasks: Sequence[Task], *, origin: str) -> EvalSuite:
    seen: set[tuple[str, str]] = set()
    for task in tasks:
        if (task.domain, task.task_id) in seen:
            raise DatasetError(f"suite {name}: task {task.task_id} occurs twice")
        seen.add((task.domain, task.task_id))
    digest = digest_json(sorted([task.task_id, task.domain, task.config_digest] for task in tasks))
    return EvalSuite(name=name, tasks=tuple(tasks), digest=digest, origin=origin)


def _read_task(path: Path, *, domain: str | None = None) -> Task:
    what_to_do = "a task of the suite is missing; put its file there, or remove the task from the suite"
    return _task(_read_json(path, what_to_do=what_to_do), str(path), domain=domain)


def _task(config: Any, where: str, *, domain: str | None = None) -> Task:
    if not isinstance(config, Mapping):
        raise DatasetError(f"{where} is not a task: it is not a JSON object")
    try:
        return Task.from_config(config, domain=domain)
    except TaskError as error:
        raise DatasetError(f"{where}: {error}") from error


def _checked_words(task: Task, where: str) -> tuple[str, ...]:
    try:
        return check_task(task)
    except TaskError as error:
        raise DatasetError(f"{where}: {error}") from error


def _read_json(path: Path, *, what_to_do: str) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DatasetError(f"there is no {path}: {what_to_do}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read as JSON ({error})") from error
