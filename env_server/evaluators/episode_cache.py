"""The files of an episode, in memory. The bytes that a policy can make the server hold are limited for each check and
for the whole server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from env_server.guest_client import FileTooLargeError
from osworld_pipeline.errors import EvaluatorError
from osworld_pipeline.task_schema.context import ResultFile

log = logging.getLogger("env_server")

SMALL_BYTES = 4 << 20
"""Size of all files of one check together; every check may hold this much at any time."""
MAX_FILE_BYTES = 32 << 20
"""Limit of one graded file."""
MAX_CHECK_BYTES = 64 << 20
"""Limit of all files of one check together."""
NUM_LARGE_CHECKS = 8
"""Checks of one server that may hold more than SMALL_BYTES at a time."""


class LargeChecks(asyncio.Semaphore):
    """Limits how many checks hold large files; one for a whole server."""

    def __init__(self, num_checks: int = NUM_LARGE_CHECKS) -> None:
        super().__init__(num_checks)


class EpisodeCache:
    """OSWorld's cache folder of one episode, in memory: files that set-up verbs stored for the grader, by name, and
    files that the current check has fetched. Small files are also kept for all later checks, up to SMALL_BYTES."""

    def __init__(self, large_checks: LargeChecks | None = None, *, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._files: dict[str, ResultFile] = {}
        self._fetched: dict[str, ResultFile] = {}
        self._num_kept_bytes = 0
        self._large_checks = large_checks or LargeChecks()
        self._is_large = False
        self._max_bytes = max_bytes

    def put(self, name: str, data: bytes) -> ResultFile:
        held = sum(len(file.data) for key, file in self._files.items() if key != name)
        if held + len(data) > self._max_bytes:
            raise EvaluatorError(f"the grader's files exceed {self._max_bytes} bytes at {name!r}")
        self._files[name] = ResultFile(name=name, data=data)
        return self._files[name]

    @asynccontextmanager
    async def check(self) -> AsyncIterator[None]:
        """Large files that are fetched within the block are released at its end."""
        try:
            yield
        finally:
            fetched, self._fetched = self._fetched, {}
            num_bytes = _num_bytes(fetched)
            if self._is_large:
                self._is_large = False
                self._large_checks.release()
            elif self._num_kept_bytes + num_bytes <= SMALL_BYTES:
                self._num_kept_bytes += num_bytes
                self._files |= fetched

    async def fetch(self, name: str, read: Callable[[int], Awaitable[bytes | None]]) -> ResultFile | None:
        """The file that `read` returns. `read` is called with the most bytes to read and returns None if there is no
        file. Waits for a free slot if this check would hold more than SMALL_BYTES. To be called within `check`.

        Also None for a file that is too large to be an answer: a policy must not cause a fault by writing one."""
        try:
            data = await self._read(read)
        except FileTooLargeError as error:
            log.warning("%s: graded as a missing file", error)
            return None
        if data is None:
            return None
        file = ResultFile(name=name, data=data)
        self._fetched[name] = file
        return file

    async def _read(self, read: Callable[[int], Awaitable[bytes | None]]) -> bytes | None:
        held = _num_bytes(self._fetched)
        if not self._is_large:
            try:
                return await read(SMALL_BYTES - held)
            except FileTooLargeError:
                await self._large_checks.acquire()
                self._is_large = True
        return await read(min(MAX_FILE_BYTES, MAX_CHECK_BYTES - held))

    def __iter__(self) -> Iterator[ResultFile]:
        return iter(list((self._files | self._fetched).values()))

    def get(self, name: str) -> ResultFile | None:
        return self._fetched.get(name) or self._files.get(name)


def _num_bytes(files: dict[str, ResultFile]) -> int:
    return sum(len(file.data) for file in files.values())
