"""States of released versions, which tests open with the present program (tests/states/make.py makes them)."""

import subprocess
from pathlib import Path

from osworld_pipeline.domain.state import StateDir

ARCHIVES = sorted((Path(__file__).resolve().parent / "states").glob("*.tar.xz"))
VERSIONS = [path.name.removesuffix(".tar.xz") for path in ARCHIVES]


def unpack(version: str, root: Path) -> StateDir:
    """The state of that version as a new folder `root`."""
    (archive,) = (path for path in ARCHIVES if path.name == f"{version}.tar.xz")
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(root)], check=True)
    return StateDir(root)
