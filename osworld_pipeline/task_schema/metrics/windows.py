"""Metrics over files that Windows programs wrote, in any encoding and with any line ends, with partial scores.

The five checkers and their scores are the Windows example's: 1 for the requested result, 0.5 for most of it, 0.1 or 0.2
for a file that exists and is not empty, 0 for no result.
"""

import re
from collections.abc import Sequence
from typing import Annotated

from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.examples import FILE
from osworld_pipeline.task_schema.spec import Rule, metric

MOST = 0.5
ANY_TEXT = 0.2
"""Score of a text that differs from the expected one."""
ANY_CONTENT = 0.1
"""Score of a listing or an answer that differs from the expected one."""
_DATE = re.compile(r"(?<![0-9])[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


def windows_text(data: bytes) -> str:
    """Text as Windows programs write it: UTF-8 or UTF-16 by its byte order mark, UTF-16 without one by its zero bytes
    (`cmd /u`), UTF-8, or else Windows-1252, which accepts every file. Line ends become line feeds. Never raises."""
    return _with_line_feeds(_decoded(data))


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    num_pairs = len(data) // 2
    # In UTF-16, one of every two bytes of Latin text is zero; other text has no zero bytes.
    high, low = data[1::2].count(0), data[0::2].count(0)
    if num_pairs and max(high, low) * 2 >= num_pairs:
        return data.decode("utf-16-le" if high >= low else "utf-16-be", "replace")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


@metric("file", "rules", example=(FILE, {"expected": "milk"}))
def windows_exact_match(result: ResultFile | None, *, expected: Annotated[str, Rule("the text")]) -> float:
    """1 if a text file is the text, 0.5 if it contains it in any letter case, 0.2 for any other text. Encodings and
    line ends of Windows are supported.

    ValueError if the text is blank, which every file contains."""
    target = _trimmed(str(expected))
    if not target:
        raise ValueError("the expected text is blank: every file contains it")
    text = _text_of(result)
    if text == target:
        return 1.0
    if target.casefold() in text.casefold():
        return MOST
    return ANY_TEXT if text else 0.0


@metric("file", "rules", example=(FILE, {}))
def windows_date_format(result: ResultFile | None) -> float:
    """1 if a text file is a date like 2026-11-22, 0.5 if it contains one, 0.1 for any text."""
    text = _text_of(result)
    if _DATE.fullmatch(text):
        return 1.0
    return MOST if _DATE.search(text) else ANY_CONTENT if text else 0.0


@metric("file", "rules", example=(FILE, {"expected": ["ada.txt", "bob.txt"]}))
def windows_names_listed(result: ResultFile | None, *, expected: Annotated[Sequence[str], Rule("the names")]) -> float:
    """1 if a text file contains at least two of the names, in any letter case, 0.5 for one, 0.1 for any other text."""
    text = _text_of(result)
    num_found = sum(name.casefold() in text.casefold() for name in _names(expected))
    return 1.0 if num_found >= 2 else MOST if num_found else ANY_CONTENT if text else 0.0


@metric("file", "rules", example=(FILE, {}))
def windows_non_empty(result: ResultFile | None) -> float:
    """1 if a file contains more than white space."""
    return float(bool(_text_of(result)))


@metric("file", "rules", example=(FILE, {"expected": ["milk", "bread"]}))
def windows_has_all(result: ResultFile | None, *, expected: Annotated[Sequence[str], Rule("the words")]) -> float:
    """1 if a text file contains each of the words, 0.5 for some of them, 0.1 for any other text."""
    text = _text_of(result)
    found = [name in text for name in _names(expected)]
    return 1.0 if all(found) else MOST if any(found) else ANY_CONTENT if text else 0.0


def _text_of(result: ResultFile | None) -> str:
    """Empty if the file is missing."""
    return "" if result is None else _trimmed(windows_text(result.data))


def _trimmed(text: str) -> str:
    """Strips white space around the text and at line ends: `echo text > file` writes the space, too."""
    return "\n".join(line.rstrip() for line in _with_line_feeds(text).strip().split("\n"))


def _names(expected: Sequence[str]) -> list[str]:
    """ValueError if there is no name, or a blank one, which every text contains."""
    names = [str(name) for name in expected]
    if not names or not all(name.strip() for name in names):
        raise ValueError("the expected names are missing or blank: every file contains them")
    return names
