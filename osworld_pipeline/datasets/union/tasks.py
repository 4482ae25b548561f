"""The tasks of the union: every base id of any source, its config, and whether it can be trained on."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from osworld_pipeline.datasets.raw import RawTask, Reject, read_tasks_at
from osworld_pipeline.datasets.sources import Source
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError

_WINDOWS_SNAPSHOTS = ("excel", "word", "powerpoint")
ASKED_FOR = ("windows-basics/", "wine-basics/")
"""Sources of Windows tasks that the recipe's desktops can run."""
# As in JSON, where a backslash is escaped.
_WINDOWS_PATHS = ("C:\\\\", "C:/", "\\\\Users\\\\")


@dataclass(kw_only=True)
class TaskConfigs:
    """Configs by base id. Of several distill configs the first is used, of several files of the tree the last. If
    several domains have an id, `twins` has a separate task for each domain."""

    distill: dict[str, RawTask] = field(default_factory=dict)
    tree: dict[str, RawTask] = field(default_factory=dict)
    twins: dict[str, dict[str, RawTask]] = field(default_factory=dict)
    """For ids that several domains of the tree have: the last file of each domain, by base id, then by domain."""
    bare: dict[str, RawTask] = field(default_factory=dict)
    """The first row of an id with an instruction or a domain but no config."""
    imported: dict[str, RawTask] = field(default_factory=dict)
    imported_twins: dict[str, dict[str, RawTask]] = field(default_factory=dict)
    """The first imported task of each domain, by base id, then by domain, for ids that several domains have."""
    task_ids: set[str] = field(default_factory=set)
    """Seen in a source of tasks other than the tree."""
    num_records: Counter[str] = field(default_factory=Counter)
    rejects: list[Reject] = field(default_factory=list)
    shadowed: list[Reject] = field(default_factory=list)
    """Files of the tree with the id of a later file of another domain: artefacts identify tasks by id alone."""

    def read(self, source: Source, path: Path, *, is_import: bool = False) -> None:
        """Reads one source; rejects are kept in `rejects`."""
        for item in read_tasks_at(source, path):
            if isinstance(item, Reject):
                self.rejects.append(item)
                continue
            self.num_records[source.name] += 1
            if source.kind == "task_tree":
                self._put_tree_task(item)
                continue
            self.task_ids.add(item.base_id)
            if is_import:
                earlier = self.imported.setdefault(item.base_id, item)
                if earlier.domain != item.domain:
                    twins = self.imported_twins.setdefault(item.base_id, {earlier.domain: earlier})
                    twins.setdefault(item.domain, item)
            elif item.config is not None:
                self.distill.setdefault(item.base_id, item)
            elif item.instruction or item.domain:
                self.bare.setdefault(item.base_id, item)

    def _put_tree_task(self, item: RawTask) -> None:
        earlier = self.tree.get(item.base_id)
        if earlier is not None and earlier.domain != item.domain:
            self.twins.setdefault(item.base_id, {earlier.domain: earlier})
        if item.base_id in self.twins:
            self.twins[item.base_id][item.domain] = item
        if earlier is not None:
            same = "with the same content" if earlier.config == item.config else "with another content"
            reason = f"{item.path} has the same id, {same}, and comes later in order"
            rejects = self.rejects if earlier.domain == item.domain else self.shadowed
            rejects.append(_reject(earlier, "duplicate_task", reason))
        self.tree[item.base_id] = item

    def chosen(self, task_id: str) -> tuple[RawTask | None, str]:
        for configs, name in (
            (self.distill, "distill_data"), (self.tree, "osworld_repo"), (self.imported, "import"),
        ):  # fmt: skip
            if task_id in configs:
                return configs[task_id], name
        return None, "missing"

    def twins_of(self, task_id: str) -> Mapping[str, RawTask]:
        """The tasks with this id, by domain; empty unless several domains have it."""
        if task_id in self.imported and task_id not in self.tree and task_id not in self.distill:
            return self.imported_twins.get(task_id, {})
        return self.twins.get(task_id, {})


@dataclass(kw_only=True)
class UnionTasks:
    rows: list[dict[str, Any]] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    """Tasks whose config cannot be run, and tasks that are not trained on because several domains have their id."""


def join_tasks(task_ids: Iterable[str], configs: TaskConfigs, replay_ids: set[str], *, is_artefact: bool) -> UnionTasks:
    """The rows by task id. An artefact's `task_config` keeps the config's own order of keys and accepts a config
    without an evaluator, like Slime-OSWorld; the table's is canonical, and all its training tasks can be scored.

    The table has a row for each domain of an id. Demonstrations name the id alone, so such a task is trained on only if
    a source of configs selects one, or all others are Windows tasks."""
    union = UnionTasks()
    for task_id in sorted(task_ids):
        task, source = configs.chosen(task_id)
        twins = {} if is_artefact else configs.twins_of(task_id)
        of_twins = "import" if source == "import" else "osworld_repo"
        meant = [twin for twin in twins.values() if not _is_for_windows(twin)] if source == of_twins else []
        task = meant[0] if meant else task
        if task is None and not is_artefact:
            task = configs.bare.get(task_id)
        row, config = _row(task_id, task, source, configs, is_artefact=is_artefact)
        others = [
            _row(task_id, twin, of_twins, configs, is_artefact=False)[0]
            for domain, twin in twins.items()
            if domain != row["domain"]
        ]
        union.rows += sorted([row, *others], key=lambda one: one["domain"])
        if task is not None and len(meant) > 1:
            if task_id in replay_ids:
                domains = ", ".join(sorted(twin.domain for twin in meant))
                reason = f"not trained on: {domains} each have a task with this id; demonstrations name the id alone"
                union.rejects.append(_reject(task, "duplicate_task", reason))
            continue
        if task is None or config is None:
            continue
        problem = _problem(config)
        if problem is not None:
            union.rejects.append(_reject(task, "bad_task", problem))
        is_usable = problem is None or (is_artefact and "evaluator" not in config)
        is_ours = not is_artefact and str(config.get("source", "")).startswith(ASKED_FOR)
        if is_usable and (row["platform"] != "windows" or is_ours) and task_id in replay_ids:
            union.train.append(row)
    return union


def _row(
    task_id: str, task: RawTask | None, source: str, configs: TaskConfigs, *, is_artefact: bool
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    config = None if task is None or task.config is None else {**task.config, "id": task_id}
    config_domain = _config_domain(config or {})
    text = "{}" if config is None else _ordered_json(config) if is_artefact else canonical_json(config)
    instruction = (config or {}).get("instruction")
    row = {
        "task_id": task_id,
        "prompt": task_id,
        "domain": config_domain if is_artefact else _domain(task_id, task, config_domain, configs),
        "instruction": instruction if isinstance(instruction, str) else task.instruction if task else "",
        "task_config": text,
        "task_config_source": source,
        "has_task_config": config is not None,
        "platform": "unknown" if config is None else "windows" if is_windows(config) else "ubuntu",
    }
    return (row if is_artefact else {**row, "config_domain": config_domain}), config


def is_windows(config: Mapping[str, Any]) -> bool:
    """Decides by the snapshot, or by a Windows path anywhere in keys or values."""
    if str(config.get("snapshot", "")).lower() in _WINDOWS_SNAPSHOTS:
        return True
    text = json.dumps(config)
    return any(path in text for path in _WINDOWS_PATHS)


def _is_for_windows(task: RawTask) -> bool:
    """Decides for a file of the tree by its folder, or by its config."""
    return "Windows" in PurePosixPath(task.path).parts or is_windows(task.config or {})


def _ordered_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, ensure_ascii=False)


def _config_domain(config: Mapping[str, Any]) -> str:
    """The domain that the config names, else its first related app."""
    apps = config.get("related_apps")
    first_app = apps[0] if isinstance(apps, list) and apps else ""
    return next((name for name in (config.get("domain"), first_app) if isinstance(name, str) and name), "")


def _domain(task_id: str, task: RawTask | None, config_domain: str, configs: TaskConfigs) -> str:
    """The first of the config's domain, the source's, OSWorld's folder and the first related app that is known. If
    several folders have the id, only the folder distinguishes the tasks."""
    twins = configs.twins_of(task_id)
    if task is not None and twins.get(task.domain) is task:
        return task.domain
    own = task.config.get("domain") if task is not None and task.config is not None else None
    in_tree = None if twins else configs.tree.get(task_id)
    candidates = (own, task.domain if task else "", in_tree.domain if in_tree and task else "", config_domain)
    return next((name for name in candidates if isinstance(name, str) and name), "")


def _problem(config: Mapping[str, Any]) -> str | None:
    try:
        Task.from_config(config)
    except TaskError as error:
        return str(error)
    return None


def _reject(task: RawTask, kind: str, reason: str) -> Reject:
    return Reject(
        source=task.source, path=task.path, line_no=task.line_no, kind=kind, reason=reason, task_id=task.base_id
    )
