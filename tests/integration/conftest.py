"""A real browser for tests of pages."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def viewport() -> tuple[int, int]:
    """Width and height of a tab. A module with another size has a fixture of this name."""
    return 1280, 800


@pytest.fixture
def complaints() -> list[str]:
    """The console messages of `page` and its uncaught errors."""
    return []


@pytest.fixture
def page(browser: Browser, viewport: tuple[int, int], complaints: list[str]) -> Iterator[Page]:
    """A tab of its own."""
    context = browser.new_context(viewport={"width": viewport[0], "height": viewport[1]})
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    expect.set_options(timeout=LIMIT_MS)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
