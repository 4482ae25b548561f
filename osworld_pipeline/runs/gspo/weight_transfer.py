"""Gives the engine the trainer's weights after each update. In an asynchronous phase the transfer continues while the
next update is collected and scored; the first optimiser step of that update waits until the transfer has ended."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Self, TypeVar

from osworld_pipeline.rollout.collector import Collector
from osworld_pipeline.runs.gspo.weights import Deliver, Handover

Result = TypeVar("Result")


class WeightTransfer:
    """Use it as a context manager: a transfer that still runs at the end of the block is cancelled."""

    def __init__(self, handover: Handover, collector: Collector, *, is_overlapped: bool) -> None:
        """`is_overlapped`: whether `begin` returns before the engine has the weights."""
        self._handover = handover
        self._collector = collector
        self._is_overlapped = is_overlapped
        self._running: asyncio.Task[Mapping[str, float]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def begin(self, policy_version: int) -> None:
        """Hands over the trainer's weights, which must not change before `wait` (or `end`) has returned.

        Raises:
            As Handover.
        """
        assert self._running is None, "one transfer at a time"
        started = time.monotonic()
        deliver = await self._handover(policy_version)
        self._running = asyncio.create_task(self._run(deliver, policy_version, started))
        if not self._is_overlapped:
            await self.wait()

    async def wait(self) -> None:
        """Waits until the engine has the weights; a cancelled caller does not cancel the transfer. Raises as
        Handover."""
        if self._running is not None:
            await asyncio.shield(self._running)

    async def end(self) -> Mapping[str, float]:
        """Waits likewise; returns the transfer's metrics, none if there was no transfer."""
        await self.wait()
        done, self._running = self._running, None
        return {} if done is None else done.result()

    async def unless_failed(self, work: Awaitable[Result]) -> Result:
        """Awaits `work`, which needs the weights sooner or later; a transfer that fails cancels it and raises."""
        working = asyncio.ensure_future(work)
        try:
            if self._running is not None:
                await asyncio.wait({working, self._running}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    await self.wait()
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _run(self, deliver: Deliver, policy_version: int, started: float) -> Mapping[str, float]:
        num_bytes = await deliver()
        metrics = {"handover_s": time.monotonic() - started, "handover_bytes": float(num_bytes)}
        await self._collector.advance(policy_version)
        return metrics
