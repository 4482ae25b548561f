"""Every command in a block of the documentation is run by `make test-docs`, or the page says why it is not."""

from collections import Counter
from pathlib import Path

import pytest
from page_blocks import ROOT, MarkError, check_links, matches, read_page

PAGES = sorted(name for name in check_links.documentation() if name != "CHANGELOG.md" and "/decisions/" not in name)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name: str) -> None:
    for block in read_page(ROOT / name):
        assert block.kind != "run" or block.command, f"{name}:{block.line}"


def test_many_blocks_are_run() -> None:
    kinds = Counter(block.kind for name in PAGES for block in read_page(ROOT / name))
    assert kinds["run"] + kinds["serve"] >= 35, kinds


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("```\nhello\n```", "line 1: no command that is known"),
        ("<!-- not run -->\n```\nmake test\n```", "line 2: why is it not run"),
        ("<!-- output -->\n```\n1\n```", "line 2: output without a command"),
        ("<!-- faster -->\n```\nmake test\n```", "nothing is known of the mark 'faster'"),
        ("<!-- with: ID -->\n```\nmake test\n```", "write `with: OLD => NEW`"),
    ],
)
def test_a_block_without_a_valid_mark_or_a_known_command_is_refused(tmp_path: Path, text: str, reported: str) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(MarkError, match=reported):
        read_page(tmp_path / "page.md")


def test_marks_belong_to_the_block_after_them(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "<!-- with: ID => sft-1 -->\n```\nosworld-pipeline lineage ID\n```\n<!-- output -->\n```\na\n```\n"
        "- one\n\n    <!-- not run: it takes a GPU -->\n\n      make test-gpu\n\n<!-- text -->\n```\nmake it so\n```\n"
        "```sql\nSELECT 1\n```\n"
    )
    first, second, third = read_page(tmp_path / "page.md")
    assert (first.kind, first.command, first.output) == ("run", "osworld-pipeline lineage sft-1\n", "a\n")
    assert (second.kind, second.reason, third.kind) == ("not run", "it takes a GPU", "text")


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        ("a  b\nc\n", "a b\n  c", True),
        ("took ... s\n", "took 1.25 s\n", True),
        ("took ... s\n", "took 1.25 s\nmore\n", False),
        ("first\n...\nlast\n", "first\n1\n2\nlast\n", True),
        ("first\n...\n", "first\n", True),
        ("1.0\n", "110\n", False),
        ("", "something\n", False),
    ],
)
def test_three_dots_in_an_output_match_text_that_differs_between_runs(shown: str, printed: str, is_same: bool) -> None:
    assert matches(shown, printed) is is_same


def test_the_documentation_starts_with_five_pages_that_end_in_a_result() -> None:
    """Each page has at most two screens of text and says how long its steps took and on which machine."""
    links = [link.target for link in check_links.Page(ROOT / "docs/README.md").links][:5]
    assert links == [f"doors/{name}.md" for name in ("evaluate", "look", "train", "desktops", "operate")]
    for link in links:
        path = ROOT / "docs" / link
        text = path.read_text()
        assert len(text.splitlines()) <= 80, link
        assert "\nIt took " in text, link
        assert "two cores" in text, link
        assert any(block.output for block in read_page(path) if block.kind in ("run", "serve")), link
