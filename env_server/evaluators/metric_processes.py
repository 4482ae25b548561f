"""Metrics are computed in processes that can be killed. Data of a policy or a pattern of a task may make a metric use
unlimited time and memory: in the server it would block every other episode, and a time limit cannot end a thread.

A metric that exceeds a limit because of the desktop's data scores 0 and is no fault: faults are left out of training,
and a policy would learn to cause one wherever it fails."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from env_server.evaluators.metric_process import LENGTH, MEMORY_LIMIT_BYTES
from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import EvaluatorError

log = logging.getLogger("env_server")

NUM_PROCESSES = 2
"""Processes at a time; a metric takes a millisecond."""
CPU_LIMIT_S = 10
"""CPU time of one metric."""
MAX_RESULT_BYTES = 32 << 20
"""Maximum size of the desktop's data, pickled."""
END_LIMIT_S = 0.5
"""Time for an idle process to exit by itself."""
WALL_LIMIT_S = 60.0
"""Many times the CPU limit: a timeout means that this machine is at fault."""


class MetricProcesses:
    """Processes are started on demand, and again after one has ended."""

    def __init__(self, *, cpu_limit_s: int = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._slots = asyncio.Semaphore(NUM_PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []

    async def run(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> float:
        """The score; 0 if the first argument, the desktop's data, is too large, or if the metric exceeds its limit of
        CPU time or memory.

        Raises:
            EvaluatorError: the metric crashed, or exceeded the wall-clock limit.
        """
        async with self._slots:
            # Pickled inside the semaphore, which limits the number of concurrent copies.
            request = pickle.dumps((name, list(arguments), dict(options)), protocol=5)
            if arguments and len(request) > MAX_RESULT_BYTES < len(pickle.dumps(arguments[0], protocol=5)):
                return _too_much(name, f"{MAX_RESULT_BYTES >> 20} MiB of space")
            process = self._take_idle() or await self._start()
            try:
                answer = await _ask(process, request)
            except BaseException as error:
                status = await _end(process)
                if isinstance(error, TimeoutError):
                    raise EvaluatorError(f"the metric {name} took longer than {WALL_LIMIT_S:g} s") from error
                if isinstance(error, asyncio.IncompleteReadError | OSError):
                    if status == -signal.SIGXCPU:
                        return _too_much(name, f"{self._cpu_limit_s} s of CPU time")
                    raise EvaluatorError(f"the process of the metric {name} ended with status {status}") from error
                raise
            self._idle.append(process)
        if "is_too_much" in answer:
            return _too_much(name, f"{MEMORY_LIMIT_BYTES >> 30} GiB of memory")
        if "error" in answer:
            raise EvaluatorError(f"the evaluator {name} crashed: {answer['error']}")
        return float(answer["score"])

    def _take_idle(self) -> asyncio.subprocess.Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *python_module("env_server.evaluators.metric_process"), str(os.getpid()), str(self._cpu_limit_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())


async def _ask(process: asyncio.subprocess.Process, request: bytes) -> dict[str, Any]:
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    async with asyncio.timeout(WALL_LIMIT_S):
        process.stdin.writelines([LENGTH.pack(len(request)), request])
        await process.stdin.drain()
        length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
        return json.loads(await process.stdout.readexactly(length))


async def _end(process: asyncio.subprocess.Process) -> int:
    """Returns its exit status; a process that has closed its output is exiting by itself and keeps its own status."""
    assert process.stdin is not None, "a pipe"
    process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait()


def _too_much(name: str, what: str) -> float:
    log.warning("the metric %s needs more than %s for the desktop's data: scored 0", name, what)
    return 0.0
