"""Where desktop-env is installed for tests, if it is."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def find_python() -> Path:
    """The Python of desktop-env. Skips the test where desktop-env is not installed."""
    folder = Path(os.environ.get("OSWORLD_DESKTOP_ENV", REPOSITORY / "var" / "desktop-env"))
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"no desktop-env at {folder} (osworld-pipeline setup desktop-env, or name it in OSWORLD_DESKTOP_ENV)"
        )
    return python
