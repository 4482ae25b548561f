"""Finds an installed desktop-env and its features, read from its sources without loading it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError

PROBE_LIMIT_S = 60.0
_HERE = Path(__file__).resolve().parent
SEARCH_PATH = (_HERE / "stubs",)
"""Last folders of that Python's module search path: substitutes for packages that the installation leaves out."""


@dataclass(frozen=True, kw_only=True)
class DesktopEnvInstall:
    python: Path
    version: str
    digest: str
    """Digest of the sources that compute scores."""
    metrics: frozenset[str]
    getters: frozenset[str]
    port_getters: frozenset[str]
    """Getters that reach a browser or VLC through a port of the desktop."""
    verbs: frozenset[str]
    folders: tuple[Path, ...]
    """The folders that an interpreter of that environment reads; /usr may be among them."""
    search_path: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The version label of scores by these evaluators."""
        return f"desktop-env-{self.version}+{self.digest[:12]}"

    @classmethod
    def find(cls, python: Path, search_path: tuple[Path, ...] = SEARCH_PATH) -> Self:
        """
        Raises:
            DependencyError: there is no such interpreter, or no desktop-env in it.
        """
        # Not resolved: a virtual environment is selected by the path of the link to its interpreter.
        python = python.absolute()
        command = [str(python), "-I", str(_HERE / "worker" / "probe.py"), *map(str, search_path)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DependencyError(f"desktop-env's Python {python} cannot be run ({error}); {_way_out()}") from error
        if done.returncode:
            complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise DependencyError(
                f"the desktop-env of {python} cannot be read ({complaint[-1] if complaint else done.returncode}); "
                f"{_way_out()}"
            )
        probed = json.loads(done.stdout)
        if probed is None:
            raise DependencyError(f"{python} has no desktop-env; {_way_out()}")
        sets = {key: frozenset(probed[key]) for key in ("metrics", "getters", "port_getters", "verbs")}
        folders = tuple(map(Path, probed["folders"]))
        return cls(
            python=python,
            version=probed["version"],
            digest=probed["digest"],
            folders=folders,
            search_path=search_path,
            **sets,
        )


def _way_out() -> str:
    return f"create it with `{how_to_set_up('desktop-env')}`, or name its interpreter with --desktop-env-python"
