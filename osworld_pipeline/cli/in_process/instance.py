"""The Dagster instance of a state: one instance for each, so that runs and sensors of one state do not see those of
another.

The default state (`var`) uses the instance of dagster.yaml in this folder. Any other state keeps its runs in
`<state>/dagster`, with a copy of that file; `python -m osworld_pipeline.cli.in_process.instance STATE` prints that
folder, which is the DAGSTER_HOME of its webserver and daemon. They are started in that folder, because the .env here
names the default instance.
"""

import sys
from pathlib import Path

import dagster as dg

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.domain.state import DEFAULT_STATE, StateDir
from osworld_pipeline.errors import DependencyError

CONFIG = "dagster.yaml"
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
    config = Path(CONFIG)
    if not config.is_file():
        raise DependencyError(f"there is no {CONFIG} here: run this from the repository root")
    default = f"{DEFAULT_STATE}/{FOLDER}"
    if state.root == Path(DEFAULT_STATE).resolve():
        Path(default).mkdir(parents=True, exist_ok=True)
        return Path.cwd()
    home = state.root / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    text = config.read_text().replace(f": {default}", f": {home}")
    if not (home / CONFIG).is_file() or (home / CONFIG).read_text() != text:
        write_file(home / CONFIG, text.encode())
    return home


if __name__ == "__main__":
    print(instance_home(StateDir(Path(sys.argv[1]).resolve())))
