"""A state folder that several hosts share, at the same path or at different mounts."""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from osworld_pipeline.atomic_io import locked, remove_stale_temps, write_file
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import STATE_VARIABLE, StateDir
from osworld_pipeline.errors import StoreError

ID_FILE = "state-id"
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SharedState:
    """A state folder as the sender of this object has it. Picklable."""

    root: Path
    """Absolute."""
    file_id: str
    """Content of its id file."""
    name: str
    """Same for all hosts of a run."""

    def to_text(self) -> str:
        """One line."""
        return json.dumps([str(self.root), self.file_id, self.name])

    @classmethod
    def from_text(cls, text: str) -> Self:
        root, file_id, name = json.loads(text)
        return cls(Path(root), file_id, name)

    @classmethod
    def of(cls, state: StateDir) -> Self:
        """Raises StoreError: its id cannot be written."""
        return cls(root=state.root.absolute(), file_id=_file_id(state.root), name=state_name(state))

    def here(self) -> StateDir:
        """The same folder on this host: at the path of the sender, or where OSWORLD_STATE says.

        Raises:
            StoreError: it is at neither.
        """
        own = os.environ.get(STATE_VARIABLE)
        places = [self.root, *([Path(own).absolute()] if own else [])]
        for root in places:
            if _read_id(root) == self.file_id:
                return StateDir(root, name=self.name)
        raise StoreError(
            f"the state folder of this run is not at {' or '.join(map(str, places))} on host {os.uname().nodename}: "
            f"mount it there, or set {STATE_VARIABLE} on this host to where it is, before Ray or the queue starts"
        )

    def path_here(self, path: Path) -> Path:
        """The path on this host of the sender's `path`. A path outside the state is the same on every host. Raises
        StoreError."""
        if not path.is_relative_to(self.root):
            return path
        return self.here().root / path.relative_to(self.root)


def state_of(job: Mapping[str, Any]) -> StateDir:
    """The state folder of a job that has one."""
    return StateDir(Path(job["state_root"]), job.get("state_name", ""))


def job_here(job: Mapping[str, Any], state: StateDir) -> dict[str, Any]:
    """The job with the path of its state folder on this host. A job of the user may have none."""
    if "state_root" not in job:
        return dict(job)
    return {**job, "state_root": str(state.root), "state_name": state.name}


def state_name(state: StateDir) -> str:
    """Distinguishes states at servers that several states use, even if one is a copy of another. Raises StoreError: its
    id cannot be written."""
    return state.name or digest_json([_file_id(state.root), str(state.root.resolve())])[:12]


def _file_id(root: Path) -> str:
    """The content of the id file, which is written if there is none."""
    path = _id_file(root)
    if not path.is_file():
        with locked(path.with_suffix(".lock"), timeout_s=LOCK_TIMEOUT_S, error=StoreError, what="the state's id"):
            if not path.is_file():
                remove_stale_temps(path.parent)
                write_file(path, uuid.uuid4().hex.encode())
    return path.read_text()


def _read_id(root: Path) -> str | None:
    """None if there is no state, or none that can be read."""
    try:
        return _id_file(root).read_text()
    except OSError:
        return None


def _id_file(root: Path) -> Path:
    return StateDir(root).clients / ID_FILE
