"""The locations to check: the folders of this pipeline, and its installation."""

from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.state import StateDir


@dataclass(frozen=True, kw_only=True)
class Place:
    state: StateDir
    dagster_home: Path | None
    """None if DAGSTER_HOME is not set."""
    sglang: Path
    """The Python environment with sglang: SGLANG_ENV, or by default the one that set-up makes for a CPU."""
    desktop_env_python: Path
