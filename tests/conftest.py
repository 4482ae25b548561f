"""Shared by all tests: where real data may lie, and what this machine can run."""

import shutil
from pathlib import Path

import pytest

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DESKTOP_PROGRAMS = ("bwrap", "Xvfb", "openbox", "xterm", "mousepad", "pcmanfm", "yad")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; a test that needs what is not here is skipped and says what is missing."""
    missing = [program for program in DESKTOP_PROGRAMS if shutil.which(program) is None]
    for item in items:
        if item.get_closest_marker("desktop") and missing:
            item.add_marker(pytest.mark.skip(reason=f"no desktop here: {', '.join(missing)} (scripts/setup debian)"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("browser") and shutil.which("chromium") is None:
            item.add_marker(pytest.mark.skip(reason="no chromium"))
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    return 2 * bool(item.get_closest_marker("slow")) + bool(item.get_closest_marker("desktop"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def real_data() -> Path:
    """Real OSWorld tasks and a real trajectory, where they are."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data at {REAL_DATA}")
    return REAL_DATA
