"""The commands of every page of the documentation, run in the order of the page, in a checkout with a
small state: `make test-docs`. The output that a page shows is compared with theirs."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkout import Checkout
from page_blocks import ROOT, check_links, matches, read_page

STATE_VARIABLE = "OSWORLD_DOCS_STATE"
"""A state folder that an earlier run of the recipe `smoke` made; without it one is made."""
PAGES = [
    name
    for name in sorted(check_links.documentation())
    if name != "CHANGELOG.md" and "/decisions/" not in name
    if any(block.kind in ("run", "serve", "fails") for block in read_page(ROOT / name))
]
pytestmark = [
    pytest.mark.desktop,
    pytest.mark.slow,
    pytest.mark.skipif(
        "OSWORLD_TEST_DOCS" not in os.environ, reason="`make test-docs` runs the commands of the documentation"
    ),
]


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout.make(tmp_path_factory.mktemp("pages") / "filled")
    if state := os.environ.get(STATE_VARIABLE):
        shutil.copytree(state, checkout.root / "var", dirs_exist_ok=True, symlinks=True)
        checkout.know_ids()
    else:
        checkout.fill()
    return checkout


@pytest.fixture
def checkout(filled: Checkout, tmp_path: Path) -> Iterator[Checkout]:
    """A checkout as after the demo. Each page gets its own, because pages change the state."""
    own = Checkout.make(tmp_path / "checkout")
    for path in (filled.root / "var").iterdir():
        if path.name == "programs":
            continue
        if path.is_dir():
            shutil.copytree(path, own.root / "var" / path.name, symlinks=True)
        else:
            shutil.copy2(path, own.root / "var" / path.name)
    own.know_ids()
    yield own
    own.remove()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_work(name: str, checkout: Checkout) -> None:
    with ExitStack() as servers:
        for block in read_page(ROOT / name):
            where = f"{name}:{block.line}"
            if block.kind == "file":
                path = checkout.root / block.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(checkout.command_of(block))
                continue
            if block.kind == "serve":
                printed = servers.enter_context(checkout.serving(checkout.command_of(block)))
            elif block.kind in ("run", "fails"):
                done = checkout.shell(checkout.command_of(block))
                assert (done.returncode == 0) is (block.kind == "run"), (
                    f"{where}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
                )
                printed = done.stdout
            else:
                continue
            if block.output is not None:
                assert matches(checkout.here(block.output), printed), f"{where} prints\n{printed}"
