"""Keeps the env servers or rollout actors of a cluster running: one that ends is started again, possibly on another
machine. This module needs no Ray."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from osworld_pipeline.errors import PipelineError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
STABLE_S = 60.0
"""After a run of at least this time, failures are counted from zero again, so the next pause is FIRST_PAUSE_S."""
HOPELESS_TRIES = 3
"""If none has ever run and each has failed this many times, `wait_ready` stops waiting."""


class Kept(Protocol):
    """Its `str` says where it runs."""

    async def ended(self) -> str:
        """Waits until it or its machine has ended; returns how."""
        ...

    async def stop(self) -> None:
        """Does not raise if it has ended already."""
        ...


One = TypeVar("One", bound=Kept)


@dataclass(eq=False)
class _Slot(Generic[One]):
    number: int
    one: One | None = None
    num_failures: int = 0
    """Number of failures in a row."""
    failure: PipelineError | None = None
    """Error of the last start."""


class Keeper(Generic[One]):
    """Runs `count` of a kind from `open` to `close`."""

    def __init__(
        self, count: int, start: Callable[[int], Awaitable[One]], *, kind: str, error: type[PipelineError]
    ) -> None:
        """`start`: starts the server or actor with a number; waits, without a limit, until a machine has room for it.
        Raises PipelineError: it did not start. `kind`: for messages. `error`: class that `wait_ready` raises."""
        self._slots = [_Slot[One](number) for number in range(count)]
        self._start = start
        self._kind = kind
        self._error_type = error
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._has_run = False

    @property
    def running(self) -> list[One]:
        """Those that run now. Raises the exception of a defect that has ended the keeper."""
        self._need_tasks()
        return [slot.one for slot in self._slots if slot.one is not None]

    async def open(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(slot), name=f"{self._kind} {slot.number}") for slot in self._slots
        ]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until one runs.

        Raises:
            PipelineError: none started in time, or none has ever run and each has failed several times; quotes the
                last failure. In the second case a failure of another class than the keeper's is raised unchanged.
            Exception: a defect of this program ended the keeper.
        """
        await self._wait(lambda: bool(self.running) or self._is_hopeless(), timeout_s)
        if not self.running:
            raise self._complaint(timeout_s)

    async def wait_settled(self, timeout_s: float) -> None:
        """Waits until each runs or has failed once, at most `timeout_s`."""
        await self._wait(lambda: all(slot.one is not None or slot.num_failures for slot in self._slots), timeout_s)

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    await self._changed.wait()
                    self._changed.clear()
                    self._need_tasks()

    def _need_tasks(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    def _complaint(self, timeout_s: float) -> PipelineError:
        failure = next((slot.failure for slot in self._slots if slot.failure), None)
        if self._is_hopeless():
            assert failure is not None, "each has failed"
            if not isinstance(failure, self._error_type):
                return failure
            return self._error_type(f"no {self._kind} starts on this cluster: {failure}")
        if all(slot.failure for slot in self._slots):
            return self._error_type(f"no {self._kind} started within {timeout_s:g} s: {failure}")
        failed = f"; one failed: {failure}" if failure else ""
        return self._error_type(
            f"no {self._kind} started within {timeout_s:g} s, because no node had room for one or its start took "
            f"longer{failed}"
        )

    def _is_hopeless(self) -> bool:
        return not self._has_run and all(slot.num_failures >= HOPELESS_TRIES for slot in self._slots)

    async def _keep(self, slot: _Slot[One]) -> None:
        while True:
            how, ran_s = await self._run_once(slot)
            slot.num_failures = 0 if ran_s >= STABLE_S else slot.num_failures + 1
            self._changed.set()
            pause_s = min(FIRST_PAUSE_S * 2 ** max(0, slot.num_failures - 1), LAST_PAUSE_S) * random.uniform(0.75, 1.25)
            log.warning("%s %d: %s; it is started again in %.1f s", self._kind, slot.number, how, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self, slot: _Slot[One]) -> tuple[str, float]:
        """Starts the slot's server or actor and waits until it has ended; returns how it ended, and after how many
        seconds."""
        try:
            one = await self._start(slot.number)
        except PipelineError as error:
            slot.failure = error
            return str(error), 0.0
        slot.one, slot.failure, started = one, None, time.monotonic()
        self._has_run = True
        self._changed.set()
        log.info("%s %d runs %s", self._kind, slot.number, one)
        try:
            how = await one.ended()
        finally:
            slot.one = None
            await one.stop()
        return how, time.monotonic() - started
