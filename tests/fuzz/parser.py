"""A parser of foreign bytes as a fuzz target: the call, the errors with which it may refuse, and the seed inputs."""

import asyncio
import functools
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases"
HARD_VALUES = {"huge": b"9" * 401, "negative": b"-" + b"9" * 401, "infinite": b"1e400", "deep": b"[" * 600 + b"]" * 600}
"""What a float cannot hold, and what a recursive reader or writer cannot follow; mutations hardly find them."""
NUM_HARD = 40
"""Numbers of the seeds that are replaced by each of these."""
INPUT_LIMIT_S = 10
"""One input may take so long; a slower one is a finding."""


@dataclass(frozen=True, kw_only=True)
class Parser:
    name: str
    read: Callable[[bytes], object]
    """Returns for any bytes, or raises one of `refusals`; any other exception is a finding."""
    refusals: tuple[type[Exception], ...] = ()
    seeds: tuple[bytes, ...]
    """Inputs that are accepted; the fuzzer mutates them."""
    words: tuple[str, ...] = ()
    """Pieces that mutations insert."""
    has_numbers: bool = True
    """Whether digits in the seeds are numbers, not parts of compressed pixels."""

    def refuses(self, data: bytes) -> bool:
        """Whether `data` is refused. Any exception that is not a refusal passes through."""
        try:
            self.read(data)
        except self.refusals:
            return True
        return False

    def hard_inputs(self, value: bytes) -> Iterator[bytes]:
        """Seeds with one number replaced by `value`."""
        if not self.has_numbers:
            return
        places = [(seed, match.span()) for seed in self.seeds for match in re.finditer(rb"[0-9]+", seed)]
        for seed, (start, end) in random.Random(self.name).sample(places, min(NUM_HARD, len(places))):
            yield seed[:start] + value + seed[end:]

    @property
    def cases(self) -> list[Path]:
        """Inputs that were findings once."""
        return sorted((CASES / self.name).glob("*")) if (CASES / self.name).is_dir() else []


def text_of(data: bytes) -> str:
    """Decodes bytes as a tokenizer decodes a model's tokens: any bytes become text."""
    return data.decode(errors="replace")


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine on one event loop for the whole process."""
    return _runner().run(work)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, in memory if the machine has /dev/shm."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
