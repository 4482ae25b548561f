"""The locations to check: the folders of this pipeline, and its installation."""

from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.domain.state import StateDir

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Place:
    state: StateDir
    dagster_home: Path | None
    """None if DAGSTER_HOME is not set."""
    sglang: Path
    """The environment made by scripts/setup-sglang."""
    desktop_env_python: Path


def checkout() -> Path | None:
    """The repository's root; None if the package is installed as a wheel."""
    return ROOT if (ROOT / "scripts" / "setup").is_file() else None
