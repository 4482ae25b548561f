"""Work of one process on one block of lines: read the records, compute their keys, and write those that are not
duplicates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from osworld_pipeline.datasets.lines import Block, lines_of, too_long
from osworld_pipeline.datasets.records import read_object, task_id_of
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.datasets.union.forms import ArtefactForm, Candidate, Examined, Form, Origin, Setup
from osworld_pipeline.domain.replay import base_task_id

Fault = tuple[int, str, str, str]
"""Line in the block, kind, reason, task id."""


@dataclass(kw_only=True)
class Reading:
    """A compact summary of a block, from which the parent decides."""

    num_lines: int = 0
    num_records: int = 0
    """JSON objects, usable or not."""
    keys: list[bytes] = field(default_factory=list)
    base_ids: list[str] = field(default_factory=list)
    """Base ids of the usable records, in the order of the keys."""
    places: list[tuple[int, float | None]] = field(default_factory=list)
    """Line in the block and recorded reward of each usable record."""
    other_ids: list[str] = field(default_factory=list)
    """Base ids of unusable records; their tasks still count as seen."""
    faults: list[Fault] = field(default_factory=list)


class BlockReader:
    """Reads a block, then writes its rows, before the next block."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._form = _make_form(setup)
        self._candidates: list[Candidate] = []
        self._origin: Origin | None = None

    def read(self, block: Block, origin: Origin) -> Reading:
        reading = Reading()
        self._candidates, self._origin = [], origin
        if block.fault == "too_long":
            reading.num_lines = 1
            reading.faults.append((1, "too_long", too_long(self._setup.max_line_bytes), ""))
        elif block.fault:
            reading.faults.append((0, "unreadable", block.reason, ""))
        else:
            try:
                data = block.read()
            except OSError as error:
                reading.faults.append((0, "unreadable", f"cannot be read: {error.strerror}", ""))
                return reading
            self._candidates = list(self._usable(data, origin, reading))
        reading.keys = [candidate.key for candidate in self._candidates]
        reading.places = [(candidate.line_no, candidate.reward) for candidate in self._candidates]
        reading.base_ids = [candidate.base_id for candidate in self._candidates]
        return reading

    def write(self, kept: Sequence[int], first_line: int) -> bytes:
        """The rows of the candidates at these indices. `first_line`: number of lines before the block. Raises
        StoreError."""
        assert self._origin is not None, "write is called after read"
        chosen = [self._candidates[index] for index in kept]
        self._candidates = []
        return self._form.write(chosen, self._origin, first_line) if chosen else b""

    def _usable(self, data: bytes, origin: Origin, reading: Reading) -> Iterator[Candidate]:
        for number, line in lines_of(data):
            reading.num_lines = number
            if not line or line.isspace():
                continue
            task_id = ""
            try:
                if len(line) > self._setup.max_line_bytes:
                    raise BadRecord(too_long(self._setup.max_line_bytes), kind="too_long")
                record = read_object(line)
                reading.num_records += 1
                task_id = task_id_of(record)
                key, content, reward = self._examine(record, line, task_id, origin)
            except BadRecord as bad:
                reading.faults.append((number, bad.kind, bad.reason, task_id))
                if task_id:
                    reading.other_ids.append(base_task_id(task_id))
                continue
            yield Candidate(line_no=number, task_id=task_id, key=key, content=content, reward=reward)

    def _examine(self, record: dict[str, Any], line: bytes, task_id: str, origin: Origin) -> Examined:
        try:
            return self._form.examine(record, line, task_id, origin)
        except RecursionError:
            raise BadRecord("it is nested too deeply") from None


def _make_form(setup: Setup) -> Form:
    if setup.form == "artefact":
        return ArtefactForm(setup)
    from osworld_pipeline.datasets.union.rows import TableForm  # loads Arrow, which the artefact does not need

    return TableForm(setup)
