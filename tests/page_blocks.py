"""The blocks of a documentation page, and what is done with each: run, run as a server, compared with what was printed,
or not run, for a reason. CONTRIBUTING.md describes the marks."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import check_links  # noqa: E402 - docs/ is no package

SHELL = ("", "sh", "bash", "console")
CHECKED = ("sql", "json", "toml", "yaml", "python")
"""Languages whose blocks tests/unit/docs/test_blocks.py takes."""
PROGRAMS = (
    "osworld-pipeline", "env-server", "osworld-gateway", "make", "dagster", "scripts/", ".venv/bin/", "export ", "curl",
    "apt-get", "pip", "uv ", "install ", "mkdir", "createdb", "sysctl", "ulimit", "cd ", "cp ", "git ", "python ",
)  # fmt: skip
_ASSIGNMENTS = re.compile(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*)\s+)+|^[A-Z_]+=\S+$")

Kind = Literal["run", "serve", "fails", "file", "not run", "output", "text"]


class MarkError(ValueError):
    """A block without a mark, or with an unknown one."""


@dataclass(frozen=True)
class PageBlock:
    line: int
    text: str
    kind: Kind
    reason: str = ""
    """Of one that is not run."""
    name: str = ""
    """Of the file that the text belongs into."""
    output: str | None = None
    """What the page shows that it prints; None where it shows nothing."""
    replacements: tuple[tuple[str, str], ...] = field(default=())

    @property
    def command(self) -> str:
        """The command, with the replacements for its examples."""
        text = self.text
        for old, new in self.replacements:
            if old not in text:
                raise MarkError(f"line {self.line}: {old!r} is not in the block")
            text = text.replace(old, new)
        return text


def read_page(path: Path) -> list[PageBlock]:
    """Raises MarkError."""
    found: list[PageBlock] = []
    for block in _blocks(check_links.Page(path)):
        if block.kind == "output":
            if not found or found[-1].kind not in ("run", "serve", "fails", "not run"):
                raise MarkError(f"line {block.line}: output without a command before it")
            found[-1] = replace(found[-1], output=block.text)
        else:
            found.append(block)
    return found


def _blocks(page: check_links.Page) -> Iterator[PageBlock]:
    for block in page.blocks:
        if block.language in CHECKED and not block.marks:
            continue
        kind: Kind | None = None
        reason, name, replacements = "", "", []
        for mark in block.marks:
            word, _, rest = mark.partition(": ")
            if word == "not run":
                kind, reason = "not run", " ".join(rest.split())
            elif word in ("output", "text", "serve", "fails", "run"):
                kind = word
            elif word == "file":
                kind, name = "file", rest
            elif word == "with":
                old, arrow, new = rest.partition("=>")
                if not arrow:
                    raise MarkError(f"line {block.line}: write `with: OLD => NEW`, not {mark!r}")
                replacements.append((old.strip(), new.strip()))
            else:
                raise MarkError(f"line {block.line}: nothing is known of the mark {mark!r}")
        if kind is None and is_command(block.text):
            kind = "run"
        if kind is None:
            raise MarkError(f"line {block.line}: no command that is known; mark it as text, output or not run")
        if kind == "not run" and len(reason) < 10:
            raise MarkError(f"line {block.line}: why is it not run?")
        yield PageBlock(block.line, block.text, kind, reason=reason, name=name, replacements=tuple(replacements))


def is_command(text: str) -> bool:
    first = text.strip().splitlines()[0]
    return bool(re.fullmatch(r"[A-Z_]+=\S+", first)) or _ASSIGNMENTS.sub("", first).startswith(PROGRAMS)


def matches(shown: str, printed: str) -> bool:
    """Compares by line, without spaces at the ends; `...` matches anything on its line, or any lines if it is alone."""
    pattern = r"\s*"
    for line in shown.strip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            parts = [r"\s+".join(map(re.escape, part.split())) for part in line.strip().split("...")]
            pattern += r"[ \t]*" + r".*".join(parts) + r"[ \t]*\n"
    return re.fullmatch(pattern + r"\s*", printed.rstrip() + "\n") is not None
