"""Warm replicas and their queue: a bounded, fair wait for a free one; a live lease is never revoked."""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from env_server.protocols import Provider
from env_server.replicas.fair_queue import FairQueue
from env_server.replicas.replica import STOP_TIMEOUT_S, Lease, Replica, ReplicaState
from osworld_pipeline.errors import NoCapacityError, ReplicaError

log = logging.getLogger(__name__)

MIN_RETRY_S, MAX_RETRY_S = 1, 30
LEASE_WEIGHT = 0.2
"""Weight of the newest lease in the running mean of the lease durations."""


class Pool:
    def __init__(
        self, provider: Provider, *, num_replicas: int, queue_timeout_s: float = 60.0, start_timeout_s: float = 600.0
    ) -> None:
        self.provider = provider
        self.num_replicas = num_replicas
        self._queue_timeout_s, self._start_timeout_s = queue_timeout_s, start_timeout_s
        self._free: deque[Lease] = deque()
        self._waiting: FairQueue[asyncio.Future[Lease]] = FairQueue()
        self._replicas = [
            Replica(f"{provider.name}-{index}", provider, offer=self._offer, withdraw=self._withdraw)
            for index in range(num_replicas)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = self._is_cordoned = False
        self.is_ending = False
        """Every episode is being closed."""
        self._mean_lease_s: float | None = None
        self.on_wait: Callable[[float], None] = lambda _: None
        """Called with the seconds that each lease was waited for."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_draining(self) -> bool:
        """It grants no leases, temporarily or permanently."""
        return self._is_draining or self._is_cordoned

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas)

    def count_states(self) -> Counter[ReplicaState]:
        return Counter(replica.state for replica in self._replicas)

    def retry_after_s(self) -> int:
        """Estimated whole seconds until one more client gets a replica, from the mean lease duration; 1..30."""
        turns = (len(self._waiting) + 1) / self.num_replicas
        expected_s = turns * (self._mean_lease_s if self._mean_lease_s is not None else MIN_RETRY_S)
        return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(expected_s)))

    async def start(self) -> None:
        """Returns when every replica is warm, or at the end of the limit if at least one is: the others continue to
        start, and are leased once they are warm.

        Raises:
            DependencyError, ReplicaError: one of them can never start, or none was warm in time. Call `close` in any
                case.
        """
        for index, replica in enumerate(self._replicas):
            self._tasks.append(asyncio.create_task(replica.run(), name=replica.replica_id))
            if index == 0:
                # The first one starts alone, so that the image is built once for all.
                await replica.wait_warm(self._start_timeout_s)
        late = [error for error in await asyncio.gather(*map(self._lateness, self._replicas)) if error is not None]
        if late:
            log.warning(
                "%d of %d replicas are not warm after %g s; serving with the others meanwhile: %s",
                len(late), self.num_replicas, self._start_timeout_s, late[0],
            )  # fmt: skip

    async def _lateness(self, replica: Replica) -> ReplicaError | None:
        """The reason why it is not warm at the end of the limit, or None. Raises DependencyError."""
        try:
            await replica.wait_warm(self._start_timeout_s)
        except ReplicaError as error:
            return error
        return None

    def drain(self) -> None:
        """Grants no further leases; waiting clients get an error at once. Live leases are not affected."""
        self._is_draining = True
        self._refuse_waiting()

    def cordon(self, *, is_cordoned: bool) -> None:
        """Does the same as `drain`, but can be undone."""
        self._is_cordoned = is_cordoned
        if is_cordoned:
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        while self._waiting:
            future = self._waiting.pop()
            if not future.done():
                future.set_exception(self._refusal())

    def _refusal(self) -> NoCapacityError:
        why = "is shutting down" if self._is_draining else "takes no new episodes at present"
        return NoCapacityError(f"the env server {why}; use another one")

    async def close(self) -> None:
        """Stops every desktop; idempotent."""
        self.is_ending = True
        self.drain()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S + 5.0)
            for task in stuck:
                log.error("replica %s did not stop within %g s", task.get_name(), STOP_TIMEOUT_S)
        await self.provider.close()

    @asynccontextmanager
    async def lease_replica(self, client_id: str, *, queue_s: float | None = None) -> AsyncIterator[Lease]:
        """A warm desktop; it is returned and reset when the block ends. `queue_s`: a shorter limit of the wait than the
        pool's own.

        Raises:
            NoCapacityError: none became free within the bounded wait, or the pool grants no leases (`is_draining`).
        """
        asked_at = time.monotonic()
        lease = await self._take(client_id, min(self._queue_timeout_s, queue_s or math.inf))
        taken_at = time.monotonic()
        self.on_wait(taken_at - asked_at)
        try:
            yield lease
        finally:
            lease.release()
            lasted_s, mean_s = time.monotonic() - taken_at, self._mean_lease_s
            self._mean_lease_s = lasted_s if mean_s is None else mean_s + LEASE_WEIGHT * (lasted_s - mean_s)

    async def _take(self, client_id: str, queue_s: float) -> Lease:
        if self.is_draining:
            raise self._refusal()
        if self._free and not self._waiting:
            lease = self._free.popleft()
            lease.take()
            return lease
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.push(client_id, future)
        try:
            async with asyncio.timeout(queue_s):
                lease = await future
            lease.take()
            return lease
        except TimeoutError as error:
            self._give_up(client_id, future)
            raise NoCapacityError(
                f"none of the {self.num_replicas} replicas became free within {queue_s:g} s; "
                "close episodes, or start the server with more --replicas"
            ) from error
        except asyncio.CancelledError:
            self._give_up(client_id, future)
            raise

    def _give_up(self, client_id: str, future: asyncio.Future[Lease]) -> None:
        self._waiting.remove(client_id, future)
        if future.done() and not future.cancelled() and future.exception() is None:
            # The lease was granted at the moment of the timeout: the next client gets the unused desktop.
            self._offer(future.result())

    def _offer(self, lease: Lease) -> None:
        if lease.is_over:
            return
        while self._waiting:
            future = self._waiting.pop()
            if not future.done():
                future.set_result(lease)
                return
        self._free.append(lease)

    def _withdraw(self, lease: Lease) -> None:
        if lease in self._free:
            self._free.remove(lease)
