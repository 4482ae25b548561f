"""The thread that calls the trainer. During an update it also sends the weights to servers that wait for them, as long
as the update only scores its batch."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import TrainingError
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.rollout.engines.sglang_weights import Consume

if TYPE_CHECKING:
    from osworld_pipeline.training.update import GspoTrainer

Result = TypeVar("Result")
IDLE_TIMEOUT_S = 5.0
"""How long `run_with` waits until the thread is free; then it raises TransientError."""
ARRIVAL_TIMEOUT_S = 1500.0
"""How long an update waits for its canaries. The other ranks wait a little longer for rank 0."""


class TrainerThread:
    """A separate thread: torch has per-thread settings, and no other work may delay an update."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._arrivals: _Arrivals | None = None
        """Those of the running update; None if there are none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()

    async def __call__(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def update(
        self, trainer: "GspoTrainer", trajectories: Sequence[Trajectory], canaries: Awaitable[Sequence[Trajectory]]
    ) -> dict[str, float]:
        """Makes one update of a trainer whose weights are still being sent to the servers. `canaries`: those of the
        update; when they are available, the servers have the weights, and the trainer may change them.

        Raises:
            As trainer.update, and as `canaries`.
        """
        arrivals = self._arrivals = _Arrivals(trainer.num_updates)
        waiting = asyncio.ensure_future(canaries)
        waiting.add_done_callback(arrivals.completed)
        try:
            return await self(lambda: trainer.update(trajectories, arrivals))
        finally:
            self._arrivals = None
            arrivals.close()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def send(self, trainer: "GspoTrainer", policy_version: int, consume: Consume) -> None:
        """Passes the trainer's weights to `consume`: now, or between two passes if an update scores its batch.

        Raises:
            TransientError: the trainer changes its weights, or no longer has those of this policy version.
            EngineError: `consume` raised it.
        """
        if self._arrivals is None:
            await self.run_with(trainer, policy_version, lambda: trainer.send_weights(consume))
        else:
            _require_version(trainer, policy_version)
            await asyncio.wrap_future(self._arrivals.add(consume))

    async def run_with(self, trainer: "GspoTrainer", policy_version: int, work: Callable[[], None]) -> None:
        """Runs work that needs the weights of a policy version; does not wait for an update. Raises as `send`."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await self(lambda: None)
        except TimeoutError as error:
            raise _busy() from error

        def run() -> None:
            _require_version(trainer, policy_version)
            work()

        await self(run)


def _busy() -> TransientError:
    return TransientError("the trainer is updating the weights", is_busy=True)


def _require_version(trainer: "GspoTrainer", policy_version: int) -> None:
    if trainer.num_updates != policy_version:
        raise TransientError(f"the trainer no longer has the weights of update {policy_version}")


class _Arrivals:
    """Implements between_passes.Arrivals for one update. The trainer's thread takes what the event loop adds."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates = num_updates
        self._receivers: deque[tuple[Consume, Future[None]]] = deque()
        self._canaries: asyncio.Future[Sequence[Trajectory]] | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards the three fields above."""

    def add(self, consume: Consume) -> "Future[None]":
        """Done when `consume` has ended; fails with TransientError if the update no longer scores its batch."""
        future: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                future.set_exception(_busy())
            else:
                self._receivers.append((consume, future))
                self._changed.notify()
        return future

    def completed(self, canaries: "asyncio.Future[Sequence[Trajectory]]") -> None:
        with self._changed:
            self._canaries = canaries
            self._changed.notify()

    def close(self) -> None:
        """Nothing arrives any more: the weights change, or the update has ended or has to end."""
        with self._changed:
            self._is_closed = True
            left, self._receivers = self._receivers, deque()
            self._changed.notify()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(_busy())

    def due(self) -> Consume | None:
        with self._changed:
            return _reporting(*self._receivers.popleft()) if self._receivers else None

    def next(self) -> Consume | Sequence[Trajectory]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._receivers or self._canaries is not None or self._is_closed, ARRIVAL_TIMEOUT_S
            )
            if self._receivers:
                return _reporting(*self._receivers.popleft())
            if self._is_closed:
                raise TrainingError(f"update {self._num_updates + 1} was stopped before its first optimiser step")
            canaries = self._canaries
            if canaries is None:
                raise TrainingError(
                    f"update {self._num_updates + 1}: the weights of update {self._num_updates} did not reach the "
                    f"policy engine within {ARRIVAL_TIMEOUT_S:.0f} s; check the engine's servers, and lower "
                    "engine.request_timeout_s"
                )
        self.close()
        return canaries.result()


def _reporting(consume: Consume, future: "Future[None]") -> Consume:
    """Calls `consume` unless its caller was cancelled."""

    def run(weights: Iterable[tuple[str, Any]]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            consume(weights)
        except BaseException as error:
            future.set_exception(error)
            raise
        future.set_result(None)

    return run
