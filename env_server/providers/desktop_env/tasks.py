"""Checks task files for desktop-env. desktop-env gives a task file access to this machine's files and network, so the
file is checked and restricted first."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from env_server.driving.download import check_address
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import SetupError, TaskError
from osworld_pipeline.task_schema.reading import INFEASIBLE, suggestion

Config = Mapping[str, Any]


def check_evaluator(task: Task, install: DesktopEnvInstall, *, has_ports: bool) -> None:
    """`has_ports`: the ports of the desktop's browser and VLC can be reached.

    Raises:
        TaskError: OSWorld's evaluate would crash on it, or it needs something that is missing.
    """
    evaluator, task_id = task.config["evaluator"], task.task_id
    func = evaluator["func"]
    if func == INFEASIBLE:
        return
    is_list = isinstance(func, list)
    for name in func if is_list else [func]:
        if not isinstance(name, str) or name not in install.metrics or name == INFEASIBLE:
            raise TaskError(
                f"task {task_id} needs the metric {name!r}, which {install.name} does not have: "
                f"{suggestion(name, install.metrics)}"
            )
    for key in ("result", "expected", "options"):
        value = evaluator.get(key)
        if not value and key != "result":
            continue
        if is_list and (not isinstance(value, list) or len(value) != len(func)):
            raise TaskError(f"task {task_id} has {len(func)} evaluator functions and another number of {key!r}")
        for config in value if is_list and isinstance(value, list) else [value]:
            if key != "options":
                _check_getter(task_id, key, config, install, has_ports=has_ports)
            elif config and not isinstance(config, Mapping):
                raise TaskError(f"task {task_id} has an evaluator whose 'options' are not an object")
    if evaluator.get("conj", "and") not in ("and", "or"):
        raise TaskError(f"task {task_id} joins its metrics by {evaluator['conj']!r}; OSWorld supports 'and' and 'or'")


def _check_getter(task_id: str, key: str, config: object, install: DesktopEnvInstall, *, has_ports: bool) -> None:
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise TaskError(f"task {task_id} has an evaluator whose {key!r} is not an object with a 'type'")
    kind = config["type"]
    if kind not in install.getters:
        raise TaskError(
            f"task {task_id} needs the getter {kind!r}, which {install.name} does not have: "
            f"{suggestion(kind, install.getters)}"
        )
    if kind in install.port_getters and not has_ports:
        raise TaskError(
            f"task {task_id} needs the getter {kind!r}, which uses a port of the browser or VLC that this "
            "server's desktops do not expose; serve the task with --provider desktop_env or gateway"
        )
    names = [config.get("dest"), config.get("settings_file")] + ([config.get("path")] if kind == "cache_file" else [])
    for name in names:
        for part in name if isinstance(name, list) else [name]:
            _check_file_name(task_id, part)


def harmless_task(task: Task, install: DesktopEnvInstall, limits: TaskLimits) -> dict[str, Any]:
    """The task's config with every verb checked, and uploads restricted to the upload folder.

    Raises:
        TaskError: an unknown verb, a download that is not allowed, or a file that the task may not read or write.
    """
    verbs = {}
    for key, config in (("config", task.config), ("postconfig", task.config["evaluator"])):
        value = config.get(key) or []
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise TaskError(f"task {task.task_id} has a {key} that is not a list")
        verbs[key] = [_harmless_verb(task.task_id, verb, install, limits) for verb in value]
    evaluator = {**task.config["evaluator"], "postconfig": verbs["postconfig"]}
    return {**task.config, "config": verbs["config"], "evaluator": evaluator}


def _harmless_verb(task_id: str, verb: Any, install: DesktopEnvInstall, limits: TaskLimits) -> dict[str, Any]:
    name = verb.get("type") if isinstance(verb, Mapping) else None
    parameters = verb.get("parameters", {}) if isinstance(verb, Mapping) else None
    if not isinstance(name, str) or name not in install.verbs:
        raise TaskError(
            f"task {task_id} needs the set-up verb {name!r}, which {install.name} does not have: "
            f"{suggestion(name, install.verbs)}"
        )
    if not isinstance(parameters, Mapping):
        raise TaskError(f"task {task_id}: the 'parameters' of the set-up verb {name!r} are not an object")
    made = dict(parameters)
    if name in ("execute", "command"):
        for key in ("stdout", "stderr"):
            _check_file_name(task_id, made.get(key))
    if name in ("download", "upload_file"):
        files = made.get("files")
        if not isinstance(files, list) or not all(isinstance(file, Mapping) for file in files):
            raise TaskError(f"task {task_id}: the verb {name} needs a list of files")
        change = _allowed_download if name == "download" else _allowed_upload
        made["files"] = [change(task_id, file, limits) for file in files]
    _check_file_name(task_id, made.get("settings_file"))  # below the folder where DesktopEnv runs
    return {"type": name, "parameters": made}


def _allowed_download(task_id: str, file: Config, limits: TaskLimits) -> dict[str, Any]:
    try:
        check_address(file.get("url", ""), limits)
    except SetupError as error:
        raise TaskError(f"task {task_id}: {error}") from error
    return dict(file)


def _allowed_upload(task_id: str, file: Config, limits: TaskLimits) -> dict[str, Any]:
    """`content` and `content_base64` are our extensions; the worker writes them to a file for desktop-env."""
    if "content" in file:
        data = base64.b64encode(str(file["content"]).encode()).decode()
        return {"path": file.get("path"), "content_base64": data}
    if "content_base64" in file:
        return dict(file)
    if limits.upload_root is None:
        raise TaskError(
            f"task {task_id}: {file.get('local_path')!r} is a file of this server, and uploads are not allowed; "
            "start the env server with --upload-root FOLDER"
        )
    source = (limits.upload_root / str(file.get("local_path", ""))).resolve()
    if not source.is_relative_to(limits.upload_root.resolve()):
        raise TaskError(f"task {task_id}: {file.get('local_path')!r} is outside the server's upload folder")
    return {"path": file.get("path"), "local_path": str(source)}


def _check_file_name(task_id: str, name: object) -> None:
    """Accepts a name below the episode's folder; None and the empty string mean no file."""
    if name is None or name == "":
        return
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise TaskError(f"task {task_id} names {name!r}, which is outside its own folder")
