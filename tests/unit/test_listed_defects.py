"""The table of other systems' defects: each row names what shows that we do not have it, and that test exists."""

import re
from pathlib import Path

import pytest
from named_tests import missing_of, named_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/defects.md").read_text()
SYSTEMS = ("Slime-OSWorld", "AReaL's OSWorld example", "The Windows example", "OSGym")


def rows_of(system: str) -> list[list[str]]:
    """The cells of each row below that heading."""
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines[:2] == ["| defect | here | shown by |", "|---|---|---|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_states_the_defect_our_behaviour_and_the_tests_that_show_it(system: str) -> None:
    rows = rows_of(system)
    assert len(rows) >= 6
    for row in rows:
        assert len(row) == 3, row
        assert all(row), row
        assert named_in(row[2]), row
    assert len({row[0] for row in rows}) == len(rows), "a row stands twice"


def test_every_test_that_is_named_exists() -> None:
    named = {test for system in SYSTEMS for row in rows_of(system) for test in named_in(row[2])}
    assert len(named) > 100
    assert missing_of(named) == []


def test_the_page_names_tests_only_in_the_form_that_named_in_finds() -> None:
    """A test name that `named_in` does not find is never checked."""
    written = re.findall(r"`[^`]*::[^`]*`", PAGE)
    assert len(written) == sum(len(named_in(row[2])) for system in SYSTEMS for row in rows_of(system))
    assert set(re.findall(r"^## (.+)$", PAGE, re.M)) == set(SYSTEMS)
