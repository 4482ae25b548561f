"""Where desktop-env is installed, and what that release can do: read from its sources, without loading it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from osworld_pipeline.errors import DependencyError

PROBE_LIMIT_S = 60.0
_HERE = Path(__file__).resolve().parent
SEARCH_PATH = (_HERE / "stubs",)
"""Folders in which that Python looks for modules last: stand-ins for what the installation leaves out."""
_WAY_OUT = "make it with scripts/setup-desktop-env, or name its interpreter with --desktop-env-python"


@dataclass(frozen=True, kw_only=True)
class DesktopEnvInstall:
    python: Path
    version: str
    digest: str
    """Of the sources that scores are made by."""
    metrics: frozenset[str]
    getters: frozenset[str]
    port_getters: frozenset[str]
    """Those that reach a browser or VLC by a port of the desktop's own."""
    verbs: frozenset[str]
    folders: tuple[Path, ...]
    """All that an interpreter of that environment reads, apart from the system's /usr."""
    search_path: tuple[Path, ...]

    @property
    def name(self) -> str:
        """What a score by these evaluators is labelled with."""
        return f"desktop-env-{self.version}+{self.digest[:12]}"

    @classmethod
    def find(cls, python: Path, search_path: tuple[Path, ...] = SEARCH_PATH) -> Self:
        """
        Raises:
            DependencyError: there is no such interpreter, or no desktop-env in it.
        """
        # Not resolved: an environment's interpreter is a link, and which link it is called by makes the environment.
        python = python.absolute()
        command = [str(python), "-I", str(_HERE / "worker" / "probe.py"), *map(str, search_path)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DependencyError(f"desktop-env's Python {python} cannot be run ({error}); {_WAY_OUT}") from error
        if done.returncode:
            complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise DependencyError(
                f"the desktop-env of {python} cannot be read ({complaint[-1] if complaint else done.returncode}); "
                f"{_WAY_OUT}"
            )
        told = json.loads(done.stdout)
        if told is None:
            raise DependencyError(f"{python} has no desktop-env; {_WAY_OUT}")
        sets = {key: frozenset(told[key]) for key in ("metrics", "getters", "port_getters", "verbs")}
        folders = tuple(map(Path, told["folders"]))
        return cls(
            python=python,
            version=told["version"],
            digest=told["digest"],
            folders=folders,
            search_path=search_path,
            **sets,
        )
