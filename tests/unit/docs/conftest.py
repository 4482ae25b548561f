"""The documentation as its own checker reads it, for the tests of this folder."""

import pytest
from page_blocks import ROOT, check_links

__all__ = ["ROOT"]


@pytest.fixture(scope="session")
def pages() -> dict[str, "check_links.Page"]:
    return check_links.documentation()
