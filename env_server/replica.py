"""One slot of the pool: keeps a warm desktop in it, resets it after each lease, and replaces it when it dies."""

import asyncio
import logging
import time
from collections.abc import Callable

from env_server.providers.base import ProvidedDesktop, Provider
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.25
RESET_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0
"""One start; the first of all may build the image."""
STOP_TIMEOUT_S = 30.0
MAX_BACKOFF_S = 10.0


class Lease:
    """A warm desktop for one holder. It outlives neither its desktop nor its release; both end it once and for all."""

    def __init__(self, *, replica_id: str, desktop: ProvidedDesktop) -> None:
        self.replica_id = replica_id
        self.desktop = desktop
        self.failure: str | None = None
        """Why the desktop is gone; None while nothing is known against it."""
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def release(self) -> None:
        """Gives the desktop back, to be reset. Idempotent."""
        self._over.set()

    def fail(self, reason: str) -> None:
        """The desktop died or fell silent: it is to be replaced, and whoever holds it is told why."""
        if not self._over.is_set():
            self.failure = reason
            self._over.set()

    async def watch(self) -> None:
        """Returns when the lease is over, having failed it if the desktop dies meanwhile."""
        while not self._over.is_set():
            try:
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._over.wait()
            except TimeoutError:
                if not self.desktop.is_alive():
                    self.fail(f"the desktop of replica {self.replica_id} died; reset on another one")


class Replica:
    """`offer` receives each warm lease, `withdraw` each that failed before anybody took it."""

    def __init__(
        self,
        replica_id: str,
        provider: Provider,
        *,
        offer: Callable[[Lease], None],
        withdraw: Callable[[Lease], None],
    ) -> None:
        self.replica_id = replica_id
        self._provider = provider
        self._offer, self._withdraw = offer, withdraw
        self._was_warm = asyncio.Event()
        self._last_error: ReplicaError | DependencyError | None = None

    async def run(self) -> None:
        """For ever; cancellation stops the desktop and leaves nothing."""
        num_failures = 0
        while True:
            started_at = time.monotonic()
            try:
                desktop = await self._start()
            except (ReplicaError, DependencyError) as error:
                num_failures += 1
                self._last_error = error
                log.warning("replica %s does not start (attempt %d): %s", self.replica_id, num_failures, error)
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.25 * 2 ** min(num_failures, 6)))
                continue
            num_failures, self._last_error = 0, None
            log.info("replica %s is warm after %.2f s", self.replica_id, time.monotonic() - started_at)
            try:
                await self._lend(desktop)
            finally:
                await self._stop(desktop)

    async def wait_warm(self, timeout_s: float) -> None:
        """
        Raises:
            DependencyError: it can never start here.
            ReplicaError: it did not start in time; the reason is its last one.
        """
        deadline = time.monotonic() + timeout_s
        while not self._was_warm.is_set():
            if isinstance(self._last_error, DependencyError):
                raise self._last_error
            if time.monotonic() > deadline:
                raise self._last_error or ReplicaError(
                    f"replica {self.replica_id} was not warm after {timeout_s:g} s; see the log for what it waited for"
                )
            try:
                async with asyncio.timeout(0.05):
                    await self._was_warm.wait()
            except TimeoutError:
                continue

    async def _start(self) -> ProvidedDesktop:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._provider.start(self.replica_id)
        except TimeoutError as error:
            raise ReplicaError(f"replica {self.replica_id} did not start within {START_TIMEOUT_S:g} s") from error

    async def _lend(self, desktop: ProvidedDesktop) -> None:
        """One lease after the other; returns when the desktop is of no more use."""
        while True:
            lease = Lease(replica_id=self.replica_id, desktop=desktop)
            self._was_warm.set()
            self._offer(lease)
            try:
                await lease.watch()
            finally:
                lease.fail(f"the desktop of replica {self.replica_id} was stopped with the server")
                self._withdraw(lease)
            if lease.failure is not None:
                log.warning("replica %s is replaced: %s", self.replica_id, lease.failure)
                return
            try:
                async with asyncio.timeout(RESET_TIMEOUT_S):
                    await desktop.reset()
            except (ReplicaError, DependencyError, TimeoutError) as error:
                log.warning("replica %s is replaced, its reset failed: %s", self.replica_id, error or "timeout")
                return

    async def _stop(self, desktop: ProvidedDesktop) -> None:
        # Shielded, so that a cancelled pool still leaves no process behind; bounded, so that it ends.
        stopping = asyncio.ensure_future(desktop.stop())
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
            raise
        except (ReplicaError, TimeoutError) as error:
            log.error("replica %s did not stop cleanly: %s", self.replica_id, error or "timeout")
