"""Keeps env servers running: one that ends is started again, possibly on another machine. This module needs no Ray."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from osworld_pipeline.errors import EnvServerError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
STABLE_S = 60.0
"""A server that ran this long has started well: the next pause is the first one again."""
HOPELESS_TRIES = 3
"""If no server has ever started and each has failed so often, none will."""


class KeptServer(Protocol):
    @property
    def url(self) -> str: ...

    async def ended(self) -> str:
        """Waits until the server or its machine has ended; returns how."""
        ...

    async def stop(self) -> None:
        """Stops it and its desktops. Does not raise if it has ended already."""
        ...


StartServer = Callable[[int, int], Awaitable[KeptServer]]
"""Starts the server of a number, with a number of desktops; waits, without a limit, until a machine has room for it.
Raises EnvServerError: it did not start."""


@dataclass(eq=False)
class _Slot:
    number: int
    size: int
    url: str = ""
    """Empty while it has no server."""
    num_failures: int = 0
    """In a row."""
    complaint: str = ""
    """Why it has no server."""


class ServerKeeper:
    """`async with ServerKeeper(...)` runs the servers until the block ends."""

    def __init__(self, sizes: Sequence[int], start: StartServer) -> None:
        """`sizes`: the desktops of each server."""
        self._slots = [_Slot(number, size) for number, size in enumerate(sizes)]
        self._start = start
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._was_ready = False

    @property
    def urls(self) -> list[str]:
        """The servers that run at present. Raises what ended the keeper, a defect."""
        self._need_tasks()
        return [slot.url for slot in self._slots if slot.url]

    async def open(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(slot), name=f"env server {slot.number}") for slot in self._slots]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits for the first server.

        Raises:
            EnvServerError: none started in time, or each has failed several times; quotes the last failure.
            Exception: what ended the keeper, a defect.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._was_ready and not self._is_hopeless():
                    await self._changed.wait()
                    self._changed.clear()
                    self._need_tasks()
        if not self._was_ready:
            raise EnvServerError(self._complaint(timeout_s))

    def _need_tasks(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    def _complaint(self, timeout_s: float) -> str:
        complaint = next((slot.complaint for slot in self._slots if slot.complaint), "")
        if self._is_hopeless():
            return f"no env server starts on this cluster: {complaint}"
        failed = f"; one failed: {complaint}" if complaint else ""
        return f"no env server started within {timeout_s:g} s, because no node had room for one{failed}"

    def _is_hopeless(self) -> bool:
        return all(slot.num_failures >= HOPELESS_TRIES for slot in self._slots)

    async def _keep(self, slot: _Slot) -> None:
        while True:
            ran_s = await self._run_once(slot)
            slot.num_failures = 0 if ran_s >= STABLE_S else slot.num_failures + 1
            self._changed.set()
            pause_s = min(FIRST_PAUSE_S * 2 ** max(0, slot.num_failures - 1), LAST_PAUSE_S) * random.uniform(0.75, 1.25)
            log.warning("env server %d: %s; it is started again in %.1f s", slot.number, slot.complaint, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self, slot: _Slot) -> float:
        """Runs the slot's server to its end, and records how it ended; returns for how many seconds it ran."""
        try:
            server = await self._start(slot.number, slot.size)
        except EnvServerError as error:
            slot.complaint = str(error)
            return 0.0
        slot.url, self._was_ready, started = server.url, True, time.monotonic()
        self._changed.set()
        log.info("env server %d runs at %s with %d desktops", slot.number, server.url, slot.size)
        try:
            slot.complaint = await server.ended()
        finally:
            slot.url = ""
            await server.stop()
        return time.monotonic() - started
