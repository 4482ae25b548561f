"""Reads the records of a JSONL origin, plain or compressed, and reports progress."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.datasets.lines import MAX_LINE_BYTES, lines_of, read_blocks, too_long
from osworld_pipeline.datasets.records import read_object
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.errors import DatasetError

OnProgress = Callable[[int, int], None]
"""(done, total), in bytes or attempts."""


@dataclass(frozen=True, kw_only=True)
class Line:
    number: int
    """Line number, from 1."""
    record: dict[str, Any] | None
    """None if the line is not a JSON object; `reason` says why."""
    reason: str = ""


def read_lines(path: Path, on_progress: OnProgress | None = None) -> Iterator[Line]:
    """Every line that is not blank. Raises DatasetError if not even the start of the file can be read."""
    number = done = 0
    total = path.stat().st_size if path.is_file() else 0
    for block in read_blocks(path):
        if block.fault == "unreadable" and not number:
            raise DatasetError(f"{path}: {block.reason}; give a readable JSONL file")
        if block.fault:
            number += 1
            yield Line(number=number, record=None, reason=block.reason or too_long(MAX_LINE_BYTES))
        else:
            first = number
            for offset, line in lines_of(block.read()):
                number = first + offset
                if line.strip():
                    yield _parsed(number, line)
        done += block.num_file_bytes
        if on_progress is not None:
            on_progress(done, total)


def _parsed(number: int, line: bytes) -> Line:
    try:
        return Line(number=number, record=read_object(line))
    except BadRecord as bad:
        return Line(number=number, record=None, reason=bad.reason)
