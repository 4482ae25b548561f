"""Mannered turns are found where a person reads them, and nowhere else."""

import pytest
from check_words import find_turns, list_files

PYTHON = '''"""Whoever calls it is told.

It lives
for ever.
"""
told = tell()  # nobody's
text = f"{told} of {nobody!r}" + r"heard"
'''


def test_comments_and_strings_are_read_and_names_are_not() -> None:
    found = [(one.line, one.text) for one in find_turns("some.py", PYTHON)]
    assert found == [(1, "Whoever"), (1, "told"), (3, "lives"), (4, "for ever"), (6, "nobody"), (7, "heard")]


@pytest.mark.parametrize(("path", "lines"), [("a.md", [1, 2]), ("a.toml", [2])])
def test_pages_are_read_whole_and_toml_files_by_their_comments(path: str, lines: list[int]) -> None:
    text = 'name = "told"\nnumber = 1  # it hears of it\nplain = 2  # it reports it\n'
    assert [one.line for one in find_turns(path, text)] == lines


def test_all_text_files_are_read_except_tests_and_lists() -> None:
    paths = set(list_files())
    assert {
        ".ci/run",
        "Makefile",
        "dagster.yaml",
        "osworld_pipeline/web/static/viewer.js",
        "osworld_pipeline/web/templates/base.html.jinja",
        "scripts/setup",
    } <= paths
    assert not paths & {"constraints.txt", "docs/demo.png", "tests/unit/docs/test_check_words.py"}


def test_a_finding_says_what_to_write_instead() -> None:
    (found,) = find_turns("a.md", "the grader leaves word")
    assert found.instead == "publishes its error"
