"""States of released versions, which tests open with the present program (tests/states/make.py makes them)."""

import tarfile
from pathlib import Path

from osworld_pipeline.domain.state import StateDir

ARCHIVES = sorted((Path(__file__).resolve().parent / "states").glob("*.tar.xz"))
VERSIONS = [path.name.removesuffix(".tar.xz") for path in ARCHIVES]


def unpack(version: str, root: Path) -> StateDir:
    """The state of that version as a new folder `root`."""
    (archive,) = (path for path in ARCHIVES if path.name == f"{version}.tar.xz")
    with tarfile.open(archive) as file:
        file.extractall(root, filter="data")
    return StateDir(root)
