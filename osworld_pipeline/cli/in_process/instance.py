"""The Dagster instance of a state: one instance for each, so that runs and sensors of one state do not see those of
another.

The default state (`var`) uses the instance of dagster.yaml in the project folder, which is the working directory. Any
other state keeps its runs in `<state>/dagster`, with a copy of that file; that folder is the DAGSTER_HOME of its
webserver and daemon.
"""

from pathlib import Path

import dagster as dg

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.state import DEFAULT_STATE, StateDir
from osworld_pipeline.project import INSTANCE, need_project

FOLDER = "dagster"
"""Folder below a state."""


def open_instance(state: StateDir) -> dg.DagsterInstance:
    """Raises DependencyError if this folder has no dagster.yaml."""
    return dg.DagsterInstance.from_config(str(instance_home(state)))


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
