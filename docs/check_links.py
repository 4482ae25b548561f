"""Check that all links and pictures of the documentation exist: `python docs/check_links.py`, part of `make check`.
Links to other sites are not followed."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
START = ("README.md", "docs/README.md")
"""Every page below docs/ must be reachable from one of these."""
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Link:
    line: int
    """Line number, from 1."""
    target: str
    is_picture: bool
    alt: str = ""
    """Alternative text of a picture."""


@dataclass(frozen=True)
class Block:
    """A block of code, fenced or indented."""

    line: int
    language: str
    text: str
    marks: tuple[str, ...] = ()
    """Comments right before it. They are not rendered; the tests read them."""


class Page:
    """One Markdown file, as the parser sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = MARKDOWN.parse(path.read_text(encoding="utf-8"))

    @property
    def links(self) -> Iterator[Link]:
        for line, token in self._inline():
            if token.type == "link_open":
                yield Link(line, str(token.attrs["href"]), is_picture=False)
            elif token.type == "image":
                yield Link(line, str(token.attrs["src"]), is_picture=True, alt=token.content)

    @property
    def blocks(self) -> Iterator[Block]:
        marks: list[str] = []
        for token in self.tokens:
            if token.type == "html_block":
                marks += COMMENT.findall(token.content)
            elif token.type in ("fence", "code_block"):
                language = token.info.split()[0] if token.info.strip() else ""
                yield Block((token.map or [0])[0] + 1, language, token.content, tuple(marks))
                marks = []
            elif token.type == "inline":
                marks = []

    @property
    def spans(self) -> Iterator[tuple[int, str]]:
        """(line, text) of code within a line."""
        for line, token in self._inline():
            if token.type == "code_inline":
                yield line, token.content

    @property
    def anchors(self) -> set[str]:
        """Anchors of its headings, as GitHub makes them."""
        found: set[str] = set()
        for opening, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if opening.type == "heading_open":
                words = "".join(
                    child.content for child in inline.children or () if child.type in ("text", "code_inline")
                )
                slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
                number = 0
                while (anchor := f"{slug}-{number}" if number else slug) in found:
                    number += 1
                found.add(anchor)
        return found

    def _inline(self) -> Iterator[tuple[int, Token]]:
        for token in self.tokens:
            for child in token.children or ():
                yield (token.map or [0])[0] + 1, child


def documentation(root: Path = ROOT) -> dict[str, Page]:
    """Every page for users, by its path from the root."""
    paths = [*root.glob("*.md"), root / "env_server/README.md", *(root / "docs").rglob("*.md")]
    return {path.relative_to(root).as_posix(): Page(path) for path in sorted(paths) if path.is_file()}


def broken_links(pages: dict[str, Page], root: Path = ROOT) -> list[str]:
    """One sentence for each broken link, each picture without alternative text, and each page below docs/ that cannot
    be reached from START."""
    found: list[str] = []
    leads_to: dict[str, set[str]] = {name: set() for name in pages}
    for name, page in pages.items():
        for link in page.links:
            if link.is_picture and not link.alt.strip():
                found.append(f"{name}:{link.line}: the picture {link.target} has no alternative text")
            fault, target = _follow(page, link, pages, root)
            if fault:
                found.append(f"{name}:{link.line}: {link.target} {fault}")
            # GitHub lists the files of a folder.
            leads_to[name] |= {one for one in pages if target and target in (one, one.rpartition("/")[0])}
    reached = _reach(leads_to)
    lost = [name for name in pages if name.startswith("docs/") and name not in reached]
    return found + [f"{name}: it cannot be reached from {' or '.join(START)}" for name in lost]


def _follow(page: Page, link: Link, pages: dict[str, Page], root: Path) -> tuple[str, str]:
    """(error, target page); both may be empty."""
    parts = urlsplit(link.target)
    if parts.scheme or parts.netloc:
        return ("", "") if parts.scheme in ("http", "https", "mailto") else ("is not a link for browsers", "")
    path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
    if not path.is_relative_to(root):
        return "is outside the project", ""
    if not path.exists():
        return "does not exist", ""
    name = path.relative_to(root).as_posix()
    if parts.fragment and name in pages and parts.fragment not in pages[name].anchors:
        return f"is not a heading of {name}", name
    return "", name


def _reach(leads_to: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [name for name in START if name in leads_to]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += leads_to[name]
    return reached


def main() -> int:
    pages = documentation()
    found = broken_links(pages)
    for sentence in found:
        print(sentence, file=sys.stderr)
    if not found:
        print(f"{len(pages)} pages, {sum(1 for page in pages.values() for _ in page.links)} links: all targets exist")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
