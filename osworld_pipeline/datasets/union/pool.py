"""Distributes blocks to worker processes and returns their results in the order of the blocks, so the output does not
depend on the number of workers. A worker that dies raises one error; no worker outlives this process."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from osworld_pipeline.datasets.lines import Block
from osworld_pipeline.datasets.union.blocks import BlockReader, Reading
from osworld_pipeline.datasets.union.forms import ROWS_FOLLOW, Origin, Setup
from osworld_pipeline.errors import DatasetError, PipelineError

WORK_TIMEOUT_S = 600.0
"""If no worker sends a message for this time, the build is assumed to hang."""
STOP_TIMEOUT_S = 5.0
LARGE_BLOCK_BYTES = 24 * 2**20
"""A block above this size is read alone, to limit memory."""

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from osworld_pipeline.datasets.union.worker import main; main(int(sys.argv[2]))"
)

Job = tuple[Block, Origin]
Decide = Callable[[Job, Reading], tuple[list[int], int]]
"""Called for each block in order; returns the candidates to keep and the number of lines before this block."""


def read_blocks_in_order(
    jobs: Iterable[Job], setup: Setup, decide: Decide, *, num_workers: int
) -> Iterator[tuple[Job, bytes]]:
    """Yields each block with its output (empty if the workers write the file). With 0 workers, this process does the
    work.

    Raises:
        DatasetError: a worker died or hangs.
        StoreError: a blob cannot be written.
        OSError: the output cannot be written.
    """
    if num_workers == 0:
        reader = BlockReader(setup)
        for job in jobs:
            kept, first_line = decide(job, reader.read(*job))
            yield job, reader.write(kept, first_line)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(setup)) for _ in range(num_workers)]
        yield from _share_out(jobs, workers, decide)


@dataclass
class _Worker:
    connection: Connection
    process: subprocess.Popen[bytes]
    number: int = -1
    """Number of its block; -1: none."""
    job: Job | None = None

    @property
    def current_job(self) -> Job:
        assert self.job is not None, "the worker has a block"
        return self.job

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (OSError, EOFError) as error:
            raise self._lost() from error

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (OSError, EOFError) as error:
            raise self._lost() from error

    def receive_bytes(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._lost() from error

    def _lost(self) -> DatasetError:
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        if status is None:
            what = "closed its connection"
        else:
            what = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        where = f" at byte {self.job[0].offset} of {self.job[0].path}" if self.job else ""
        return DatasetError(
            f"worker process {self.process.pid} of the union build {what}{where}: if memory ran out, free some; "
            "then run again; no partial output remains"
        )


@contextmanager
def _worker(setup: Setup) -> Iterator[_Worker]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(PACKAGE_ROOT), str(theirs.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    connection = Connection(ours.detach())
    try:
        worker = _Worker(connection=connection, process=process)
        worker.send(setup)
        yield worker
    finally:
        connection.close()
        try:
            process.wait(STOP_TIMEOUT_S if sys.exc_info()[0] is None else 0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _share_out(jobs: Iterable[Job], workers: list[_Worker], decide: Decide) -> Iterator[tuple[Job, bytes]]:
    source = iter(jobs)
    pending: Job | None = next(source, None)
    # By number of the block; a worker with a message here waits for our answer.
    readings: dict[int, tuple[_Worker, Reading]] = {}
    sizes: dict[int, tuple[_Worker, int]] = {}
    payloads: dict[int, tuple[Job, bytes]] = {}
    next_number = next_decision = next_payload = offset = 0
    while pending is not None or any(worker.number >= 0 for worker in workers):
        for worker in workers:
            is_full = next_number - next_payload >= 2 * len(workers)
            if pending is None or worker.number >= 0 or is_full or _is_crowded(pending, workers):
                continue
            worker.number, next_number = next_number, next_number + 1
            worker.send(pending)
            worker.job = replace(pending[0], data=None), pending[1]
            pending = next(source, None)
        for worker, message in _messages(workers, waiting={*readings, *sizes}):
            if isinstance(message, Reading):
                readings[worker.number] = (worker, message)
            elif isinstance(message, int):
                sizes[worker.number] = (worker, message)
            else:
                if message is not None:
                    payloads[worker.number] = (worker.current_job, message)
                worker.number, worker.job = -1, None
        while next_decision in readings:
            worker, reading = readings.pop(next_decision)
            worker.send(decide(worker.current_job, reading))
            next_decision += 1
        while next_payload in payloads or next_payload in sizes:
            if next_payload in sizes:
                worker, num_bytes = sizes.pop(next_payload)
                payloads[next_payload] = worker.current_job, b""
                worker.send(offset)
                offset += num_bytes
            yield payloads.pop(next_payload)
            next_payload += 1


def _messages(workers: list[_Worker], *, waiting: set[int]) -> Iterator[tuple[_Worker, Reading | int | bytes | None]]:
    """Messages of the workers that do not wait for an answer: a reading, the size of their output, the rows, or None
    when all is written."""
    busy = {worker.connection: worker for worker in workers if worker.number >= 0 and worker.number not in waiting}
    ready = wait(list(busy), timeout=WORK_TIMEOUT_S)
    if not ready:
        raise DatasetError(f"the union build's workers did not respond within {WORK_TIMEOUT_S:g} s: run it again")
    for connection in ready:
        worker = busy[connection]  # type: ignore[index] - wait returns the objects it was given
        message = worker.receive()
        if isinstance(message, PipelineError | OSError):
            raise message
        yield worker, worker.receive_bytes() if message == ROWS_FOLLOW else message


def _is_crowded(job: Job, workers: list[_Worker]) -> bool:
    """Whether the block must wait: a large block is read alone."""
    held = [worker.job[0].num_bytes for worker in workers if worker.job is not None]
    return bool(held) and (job[0].num_bytes > LARGE_BLOCK_BYTES or max(held) > LARGE_BLOCK_BYTES)
