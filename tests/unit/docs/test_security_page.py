"""The threat model: each row has a protection, and its tests exist."""

import re
from pathlib import Path

from named_tests import missing_of, named_in

PAGE = (Path(__file__).resolve().parents[3] / "docs/security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|---") and "| protection |" not in line
]


def test_every_row_names_an_attack_its_protection_and_the_tests_that_show_it() -> None:
    assert len(ROWS) >= 18
    for row in ROWS:
        assert len(row) == 3, row
        assert all(row), row
        assert named_in(row[2]), row


def test_every_test_that_is_named_exists() -> None:
    named = named_in(PAGE)
    assert len(named) == len(re.findall(r"`[^`]*::[^`]*`", PAGE))
    assert missing_of(set(named)) == []
