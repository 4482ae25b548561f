"""Finds mannered turns in what a person reads: `python docs/check_words.py [FILE ...]`, part of `make check`. It reads
comments, docstrings, other strings and names of functions of Python files (in tests, where strings are data, only
docstrings), comments of TOML files, and all of other text files."""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/"
NOT_READ = ("docs/check_words.py", "tests/unit/docs/test_check_words.py", "tests/fuzz/cases", "LICENSE", "*.txt")
"""This file and its test, which contain the turns; bytes that parsers refuse; the licence; lists of packages."""


@dataclass(frozen=True)
class Turn:
    pattern: str
    instead: str


TURNS = (
    Turn(r"told|tells?|telling", "reported, configured, distinguishes, shows"),
    Turn(r"nobody|somebody|everybody|whoever", "no user, no one, any caller; or name who it is"),
    Turn(r"whatever", "any, every"),
    Turn(r"lives", "runs, is valid, is in"),
    Turn(r"beside", "next to, besides, with, in addition to"),
    Turn(r"(?:its|his|their) word", "its score, its answer, its error"),
    Turn(r"leaves? word", "publishes its error"),
    Turn(r"has no say|have no say", "is ignored"),
    Turn(r"for ever", "until cancelled, without a limit"),
    Turn(r"bury|buries|buried", "reap, discard"),
    Turn(r"crown(?:ed|s)?", "set the champion"),
    Turn(r"mend(?:s|ed|ing)?", "fix, repair, recover"),
    Turn(r"deaf", "ignores"),
    Turn(r"hears?|heard|hearing", "receives, handles"),
    Turn(r"lest|aught|ought|upon|shall", "plain modern words"),
)
ALLOWED: dict[str, tuple[str, ...]] = {
    "env_server/providers/base_image.py": ("nobody:x:65534",),
    "osworld_pipeline/object_store/bucket.py": ("tell",),
    "CHANGELOG.md": ("whatever its shaped rewards",),
}
"""Excerpts of lines that may contain a turn, by file."""
_ANY = re.compile(r"\b(?:" + "|".join(f"({turn.pattern})" for turn in TURNS) + r")\b", re.IGNORECASE)
_LINE_STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_REPLACED = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    """Line number, from 1."""
    text: str
    instead: str


def find_turns(path: str, text: str) -> Iterator[Finding]:
    allowed = ALLOWED.get(path, ())
    for number, line in _read_lines(path, text):
        for match in _ANY.finditer(line):
            if any(part in line for part in allowed):
                continue
            turn = TURNS[(match.lastindex or 1) - 1]
            yield Finding(path=path, line=number, text=match[0], instead=turn.instead)


def _read_lines(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, the text in it that a person reads)."""
    if path.endswith(".py"):
        yield from _python_lines(text, has_data_strings=path.startswith(TESTS))
    elif path.endswith(".toml"):
        for number, line in enumerate(text.splitlines(), 1):
            if "#" in line:
                yield number, line.partition("#")[2]
    else:
        yield from enumerate(text.splitlines(), 1)


def _python_lines(text: str, *, has_data_strings: bool) -> Iterator[tuple[int, str]]:
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and before is not None and before.string == "def":
            yield token.start[0], token.string.replace("_", " ")
        elif token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and (not has_data_strings or before is None or before.type in _LINE_STARTS):
            for offset, line in enumerate(_shown(token.string).splitlines()):
                yield token.start[0] + offset, line
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token


def _shown(literal: str) -> str:
    is_f_string = "f" in literal[: literal.index(literal[-1])].lower()
    return _REPLACED.sub("", literal) if is_f_string else literal


def main(arguments: list[str]) -> int:
    paths = arguments or list_files()
    findings = [finding for path in paths for finding in find_turns(path, (ROOT / path).read_text(encoding="utf-8"))]
    for finding in findings:
        print(f"{finding.path}:{finding.line}: '{finding.text}'; say instead: {finding.instead}")
    print(f"{len(paths)} files, {len(findings)} mannered turns")
    return 1 if findings else 0


def list_files() -> list[str]:
    """The text files of the checkout that are read."""
    command = ["git", "grep", "-I", "-l", "-z", "--untracked", "-e", "", "--", ".", *(f":!{path}" for path in NOT_READ)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
