"""Every link, anchor and picture of the documentation leads somewhere, and every page can be reached."""

import subprocess
import sys
from pathlib import Path

import pytest
from check_links import Page, broken_links, documentation

ROOT = Path(__file__).resolve().parents[3]


def test_every_link_and_picture_leads_somewhere(pages: dict[str, Page]) -> None:
    assert broken_links(pages) == []


def test_all_pages_of_the_documentation_are_read(pages: dict[str, Page]) -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "env_server/README.md", "docs/README.md"} <= set(pages)
    assert sum(1 for page in pages.values() for _ in page.links) > 80


def test_make_check_runs_the_link_check() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "docs/check_links.py" in recipe


def a_project(folder: Path, **texts: str) -> dict[str, Page]:
    (folder / "docs").mkdir()
    for name, text in {"README.md": "", **texts}.items():
        (folder / name).write_text(text)
    return documentation(folder)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[a](docs/gone.md)", "README.md:1: docs/gone.md does not exist"),
        ("# Top\n\n[a](#topp)", "README.md:3: #topp is not a heading of README.md"),
        ("[a](docs/page.md#two-words)", "README.md:1: docs/page.md#two-words is not a heading of docs/page.md"),
        ("[a](../elsewhere.md)", "README.md:1: ../elsewhere.md is outside the project"),
        ("![](docs/page.md)", "README.md:1: the picture docs/page.md has no alternative text"),
        ("![words](docs/gone.png)", "README.md:1: docs/gone.png does not exist"),
        ("[a][b]\n\n[b]: docs/gone.md", "README.md:1: docs/gone.md does not exist"),
    ],
)
def test_a_broken_link_is_named_with_its_line(tmp_path: Path, text: str, reported: str) -> None:
    pages = a_project(tmp_path, **{"README.md": f"{text}\n", "docs/page.md": "# One\n"})
    assert reported in broken_links(pages, tmp_path)


def test_links_that_lead_somewhere_are_not_named(tmp_path: Path) -> None:
    texts = {
        "README.md": "[a](docs/page.md#what-a-name-means-2-uses) [b](docs) [c](https://example.org/x#y)\n",
        "docs/page.md": "# What a name means: 2 uses\n[back](../README.md) `[no](link.md)`\n",
    }
    assert broken_links(a_project(tmp_path, **texts), tmp_path) == []


def test_equal_headings_have_anchors_of_their_own(tmp_path: Path) -> None:
    text = "# `made_from`\n## Same\n## Same\n[a](#same-1) [b](#made_from) [c](#same)\n"
    assert broken_links(a_project(tmp_path, **{"README.md": text}), tmp_path) == []


def test_a_page_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    pages = a_project(tmp_path, **{"docs/lost.md": "[home](../README.md)\n"})
    assert broken_links(pages, tmp_path) == ["docs/lost.md: it cannot be reached from README.md or docs/README.md"]


def test_a_link_to_a_folder_leads_to_the_pages_in_it(tmp_path: Path) -> None:
    (tmp_path / "docs" / "why").mkdir(parents=True)
    (tmp_path / "docs" / "why" / "one.md").write_text("# One\n")
    (tmp_path / "README.md").write_text("[why](docs/why)\n")
    assert broken_links(documentation(tmp_path), tmp_path) == []


def test_the_command_names_the_broken_link_and_exits_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    program = tmp_path / "docs" / "check_links.py"
    program.write_text((ROOT / "docs/check_links.py").read_text())
    (tmp_path / "README.md").write_text("[a](gone.md)\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "README.md:1: gone.md does not exist\n")
