"""The documentation as its own checker reads it, for the tests of this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("check_links", ROOT / "docs/check_links.py")
assert _SPEC is not None
assert _SPEC.loader is not None
check_links = importlib.util.module_from_spec(_SPEC)
sys.modules["check_links"] = check_links
_SPEC.loader.exec_module(check_links)


@pytest.fixture(scope="session")
def pages() -> dict[str, "check_links.Page"]:
    return check_links.documentation()
