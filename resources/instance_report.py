"""`python -m resources.instance_report FOLDER`: describes a Dagster instance as one JSON object, for the command
`doctor`, which does not import Dagster. It is read-only: it creates no folder and no table."""

import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from dagster._core.instance import InstanceRef

UNFINISHED = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.CANCELING]
Report = dict[str, Any]
_UNSET = re.compile(r'environment variable "(\w+)" which is not set')


def report(home: Path) -> Report:
    """Has `error` if its dagster.yaml is refused, or its storage cannot be opened; `is_new` if nothing is stored."""
    try:
        ref = InstanceRef.from_dir(str(home))
    except Exception as error:  # noqa: BLE001 - any error of Dagster about the file is reported
        return {"error": f"{home / 'dagster.yaml'} is refused: {_one_line(error)}"}
    if ref.storage_data is None:
        return {"error": f"{home / 'dagster.yaml'} configures run_storage and related keys separately; use `storage`"}
    folders = _folders(ref)
    found: Report = {
        "relative": any(not folder.is_absolute() for folder in folders),
        "storage": ref.storage_data.class_name,
        "pools": _pools(ref.settings),
        "monitoring": ref.settings.get("run_monitoring") or {},
    }
    if found["storage"] == "DagsterSqliteStorage" and not (folders[0] / "history").is_dir():
        return {**found, "is_new": True}
    try:
        return {**found, **_stored(_read_only(ref))}
    except Exception as error:  # noqa: BLE001 - a database may fail in any way of its driver
        if "UndefinedTable" in repr(error) or "no such table" in str(error):
            return {**found, "is_new": True}
        return {**found, "error": f"its storage cannot be opened: {_one_line(error)}"}


def _stored(instance: dg.DagsterInstance) -> Report:
    with instance:
        now = time.time()
        beats = {kind: now - beat.timestamp for kind, beat in instance.get_daemon_heartbeats().items()}
        statuses = instance.get_daemon_statuses() if beats else {}
        pools = instance.event_log_storage.get_pool_limits()
        return {
            "heartbeats_s": beats,
            "failing_daemons": sorted(
                kind for kind, status in statuses.items() if status.healthy is False and beats.get(kind, 1e9) < 60
            ),
            "limits": {pool.name: pool.limit for pool in pools if not pool.from_default},
            "without_limit": sorted(pool.name for pool in pools if pool.from_default),
            "num_unfinished": len(instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED), limit=1000)),
        }


def _read_only(ref: InstanceRef) -> dg.DagsterInstance:
    """Opens the instance read-only: Postgres storages would create their tables."""
    data = ref.storage_data
    if data is not None and data.class_name == "DagsterPostgresStorage":
        config = {**data.config_dict, "should_autocreate_tables": False}
        ref = ref._replace(custom_instance_class_data=None, storage_data=data._replace(config_yaml=yaml.dump(config)))
    return dg.DagsterInstance.from_ref(ref)


def _folders(ref: InstanceRef) -> list[Path]:
    """The folders of files, the database's first, as far as the file names them."""
    parts = (ref.storage_data, ref.local_artifact_storage_data, ref.compute_logs_data)
    named = (part.config_dict.get("base_dir") for part in parts if part is not None)
    return [Path(folder) for folder in named if isinstance(folder, str)]


def _pools(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return (settings.get("concurrency") or {}).get("pools") or {}


def _one_line(error: BaseException) -> str:
    """The root message of an error that Dagster wraps in long ones."""
    unset = _UNSET.search(str(error))
    if unset is not None:
        return f"the environment variable {unset[1]} is not set"
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, dg.DagsterInvalidConfigError):
        return " ".join(error.errors[0].message.split())[:400]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    print(json.dumps(report(Path(sys.argv[1]))))
