"""Mannered phrases are found in the texts that people read, and nowhere else."""

import pytest
from check_words import find_turns, list_files

PYTHON = '''"""Whoever calls it is told.

It lives
for ever.
"""
told = tell()  # nobody's
text = f"{told} of {nobody!r}" + r"heard"
'''
NAMES = """def deaf_server() -> None:
    # upon a call
    return upon
"""


def test_comments_and_strings_are_read() -> None:
    found = [(one.line, one.text) for one in find_turns("some.py", PYTHON)]
    assert found == [(1, "Whoever"), (1, "told"), (3, "lives"), (4, "for ever"), (6, "nobody"), (7, "heard")]


@pytest.mark.parametrize("path", ["some.py", "tests/test_some.py"])
def test_names_of_functions_are_read_and_other_names_are_not(path: str) -> None:
    assert [(one.line, one.text) for one in find_turns(path, NAMES)] == [(1, "deaf"), (2, "upon")]


def test_strings_of_tests_are_data_except_docstrings() -> None:
    assert "heard" not in [one.text for one in find_turns("tests/test_some.py", PYTHON)]
    others = [one.text for one in find_turns("some.py", PYTHON) if one.text != "heard"]
    assert [one.text for one in find_turns("tests/test_some.py", PYTHON)] == others


@pytest.mark.parametrize(("path", "lines"), [("a.md", [1, 2]), ("a.toml", [2])])
def test_pages_are_checked_as_a_whole_and_toml_files_only_in_their_comments(path: str, lines: list[int]) -> None:
    text = 'name = "told"\nnumber = 1  # it hears of it\nplain = 2  # it reports it\n'
    assert [one.line for one in find_turns(path, text)] == lines


def test_all_text_files_are_read_except_lists_and_the_examples_in_this_file() -> None:
    paths = set(list_files())
    assert {
        ".ci/run",
        "Makefile",
        "dagster.yaml",
        "osworld_pipeline/web/static/viewer.js",
        "osworld_pipeline/web/templates/base.html.jinja",
        "scripts/setup",
        "tests/conftest.py",
    } <= paths
    assert not paths & {"constraints.txt", "docs/demo.png", "tests/unit/docs/test_check_words.py"}


def test_a_finding_says_what_to_write_instead() -> None:
    (found,) = find_turns("a.md", "the grader leaves word")
    assert found.instead == "publishes its error"
