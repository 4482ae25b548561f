"""The Dagster instance of a state: one instance for each, so that runs and sensors of one state do not see those of
another.

The default state (`var`) uses the instance of dagster.yaml in the project folder, which is the working directory. Any
other state keeps its runs in `<state>/dagster`, with a copy of that file; that folder is the DAGSTER_HOME of its
webserver and daemon.
"""

from pathlib import Path

import dagster as dg
import yaml

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.domain.state import DEFAULT_STATE, StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import uses_lock_files
from osworld_pipeline.project import INSTANCE, need_project

FOLDER = "dagster"
"""Folder below a state."""


def open_instance(state: StateDir) -> dg.DagsterInstance:
    """
    Raises:
        DependencyError: this folder has no dagster.yaml.
        StoreError: its SQLite records would be on a file system without locks, or as instance_home.
    """
    home = instance_home(state)
    storage = yaml.safe_load((home / INSTANCE).read_text()).get("storage") or {}
    records = (storage.get("sqlite") or {}).get("base_dir")
    if isinstance(records, str) and uses_lock_files((home / records).absolute()):
        raise StoreError(
            f"Dagster's records in {home / records} would be on a file system without locks, which SQLite needs: set "
            f"`storage` in {need_project(Path.cwd())} to Postgres ({shell_line(PIPELINE, 'init', '--postgres')}), or "
            "its base_dir to a local disk"
        )
    return dg.DagsterInstance.from_config(str(home))


def instance_home(state: StateDir) -> Path:
    """The folder of the state's dagster.yaml, which is written unless it is this folder.

    Raises:
        DependencyError: this folder has no dagster.yaml.
        StoreError: the state's dagster.yaml cannot be written.
    """
    config = need_project(Path.cwd())
    default = f"{DEFAULT_STATE}/{FOLDER}"
    if state.root == Path(DEFAULT_STATE).resolve():
        Path(default).mkdir(parents=True, exist_ok=True)
        return Path.cwd()
    home = state.root / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    text = config.read_text().replace(f": {default}", f": {home}")
    if not (home / INSTANCE).is_file() or (home / INSTANCE).read_text() != text:
        write_file(home / INSTANCE, text.encode())
    return home
