"""Run users' SQL in processes that can be killed: a thread cannot be stopped inside one of DuckDB's functions, and no
limit inside a process bounds all of its memory (decision 0029)."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from osworld_pipeline.web.viewer.settings import TOKEN_VARIABLE, BadQuestionError, TooBusyError, ViewerError
from osworld_pipeline.web.viewer.sql_process import LENGTH, MEMORY_LIMIT_BYTES
from osworld_pipeline.wire.metrics_endpoint import TOKEN_VARIABLE as METRICS_TOKEN_VARIABLE

NUM_AT_ONCE = 2
"""Each may use up to four cores and MEMORY_LIMIT_BYTES."""
MEMORY = f"{MEMORY_LIMIT_BYTES >> 30} GiB of memory"
SECRETS = (TOKEN_VARIABLE, METRICS_TOKEN_VARIABLE, "AWS_")
"""Prefixes of the names of environment variables that these processes do not get."""
MAX_WAITING = 16
"""Queries that may wait for a slot, at most as long as the time limit of a query."""


class SqlProcesses:
    """One process for each query, killed when the query is cancelled or takes too long. The next one is started ahead,
    so that a query does not wait for Python and DuckDB to load."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._num_asked = 0
        self._starts_ahead, self._is_starting = False, False
        self._next: asyncio.subprocess.Process | None = None

    async def start_ahead(self) -> None:
        """Keep a process ready until `close`."""
        self._starts_ahead = True
        await self._start_next()

    async def close(self) -> None:
        self._starts_ahead = False
        process, self._next = self._next, None
        if process is not None:
            await _end(process)

    async def ask(self, question: Mapping[str, Any]) -> list[str]:
        """The ids of the matching episodes.

        Raises:
            BadQuestionError: an invalid condition, or one that takes too long or too much memory.
            TooBusyError: too many queries are running or waiting.
            ViewerError: no process can be started.
        """
        async with self._turn():
            process = await self._take()
            try:
                answer = await self._answer(process, question)
            finally:
                await _end(process)
                await self._start_next()
        if "ids" in answer:
            return answer["ids"]
        if "is_too_much" in answer:
            raise BadQuestionError(f"the query needs more than {MEMORY}: choose facets, or narrow the condition")
        raise BadQuestionError(answer["refused"])

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._num_asked >= NUM_AT_ONCE + MAX_WAITING:
            raise TooBusyError(f"{self._num_asked} searches and conditions are running or waiting: try again later")
        self._num_asked += 1
        try:
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._slots.acquire()
            except TimeoutError as error:
                raise TooBusyError(
                    f"other searches and conditions took {self._limit_s:g} s: try again in a moment"
                ) from error
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._num_asked -= 1

    async def _answer(self, process: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._limit_s):
                return await _exchange(process, question)
        except TimeoutError as error:
            raise BadQuestionError(
                f"stopped after {self._limit_s:g} s: choose facets instead, or use the command `query`, which may "
                "run longer (--timeout-s)"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BadQuestionError(
                f"the query's process died, perhaps because it needs more than {MEMORY}: choose facets, or narrow "
                "the condition"
            ) from error

    async def _take(self) -> asyncio.subprocess.Process:
        process, self._next = self._next, None
        if process is not None and process.returncode is None:
            return process
        try:
            return await _start()
        except OSError as error:
            raise ViewerError(f"no process can be started for SQL ({error.strerror}): try again later") from error

    async def _start_next(self) -> None:
        if not self._starts_ahead or self._is_starting or self._next is not None:
            return
        self._is_starting = True
        try:
            with suppress(OSError):  # the next query reports a lasting error
                self._next = await _start()
        finally:
            self._is_starting = False


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "osworld_pipeline.web.viewer.sql_process", str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(SECRETS)},
    )  # fmt: skip


async def _exchange(process: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    request = json.dumps(question).encode()
    process.stdin.writelines([LENGTH.pack(len(request)), request])
    await process.stdin.drain()
    length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
    return json.loads(await process.stdout.readexactly(length))


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
