"""One slot of the pool: keeps a warm desktop in it, resets it after each lease, and replaces it when it dies."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

from env_server.protocols import ProvidedDesktop, Provider
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.25
RESET_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0
"""Limit of one start; the first one may build the image."""
STOP_TIMEOUT_S = 30.0
MAX_BACKOFF_S = 10.0


ReplicaState = Literal["starting", "warm", "leased", "resetting", "failed"]
"""`failed` is a replica between two attempts to start."""


class Lease:
    """A warm desktop for one holder. It ends permanently when its desktop fails or it is released."""

    def __init__(self, *, replica_id: str, desktop: ProvidedDesktop) -> None:
        self.replica_id = replica_id
        self.desktop = desktop
        self.failure: str | None = None
        """Why the desktop is gone; None while no failure is known."""
        self.taken_at: float | None = None
        """Value of time.monotonic; None while it is not leased."""
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def take(self) -> None:
        """Marks it as leased."""
        self.taken_at = time.monotonic()

    def release(self) -> None:
        """Returns the desktop, to be reset. Idempotent."""
        self._over.set()

    def fail(self, reason: str) -> None:
        """The desktop died or does not answer: it is to be replaced, and its holder gets the reason."""
        if not self._over.is_set():
            self.failure = reason
            self._over.set()

    async def watch(self) -> None:
        """Returns when the lease is over; fails the lease if the desktop dies meanwhile."""
        while not self._over.is_set():
            try:
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._over.wait()
            except TimeoutError:
                if not self.desktop.is_alive():
                    self.fail(f"the desktop of replica {self.replica_id} died; reset on another one")


class Replica:
    """`offer` receives each warm lease, `withdraw` each that failed before it was taken."""

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
        # Providers whose resets take longer (a snapshot in a cloud) have this attribute.
        self._reset_timeout_s: float = getattr(provider, "reset_timeout_s", RESET_TIMEOUT_S)
        self._was_warm = asyncio.Event()
        self._start_error: ReplicaError | DependencyError | None = None
        self._phase: ReplicaState = "starting"
        self._phase_since = time.monotonic()
        self._lease: Lease | None = None
        self.num_starts = 0
        self.num_failures = 0
        """Starts and resets that failed, and desktops that died."""
        self.num_served = 0
        """Leases that were taken."""
        self.last_error: str | None = None

    @property
    def state(self) -> ReplicaState:
        return "leased" if self._is_taken else self._phase

    @property
    def state_since(self) -> float:
        """Value of time.monotonic."""
        lease = self._lease
        return lease.taken_at if lease is not None and lease.taken_at is not None else self._phase_since

    @property
    def desktop(self) -> ProvidedDesktop | None:
        """The desktop that is leased or warm; None while there is none."""
        return None if self._lease is None or self._lease.is_over else self._lease.desktop

    @property
    def _is_taken(self) -> bool:
        return self._lease is not None and self._lease.taken_at is not None

    async def run(self) -> None:
        """Runs until cancelled; cancellation stops the desktop and removes it."""
        num_attempts = 0
        while True:
            started_at = time.monotonic()
            self._enter("starting")
            try:
                desktop = await self._start()
            except (ReplicaError, DependencyError) as error:
                num_attempts += 1
                self._start_error = error
                self._failed(str(error))
                log.warning("replica %s does not start (attempt %d): %s", self.replica_id, num_attempts, error)
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.25 * 2 ** min(num_attempts, 6)))
                continue
            num_attempts, self._start_error = 0, None
            log.info("replica %s is warm after %.2f s", self.replica_id, time.monotonic() - started_at)
            try:
                await self._lend(desktop)
            finally:
                await self._stop(desktop)

    async def wait_warm(self, timeout_s: float) -> None:
        """
        Raises:
            DependencyError: it can never start here.
            ReplicaError: it did not start in time; the reason is that of its last attempt.
        """
        deadline = time.monotonic() + timeout_s
        while not self._was_warm.is_set():
            if isinstance(self._start_error, DependencyError):
                raise self._start_error
            if time.monotonic() > deadline:
                raise self._start_error or ReplicaError(
                    f"replica {self.replica_id} was not warm after {timeout_s:g} s; see the log for the reason"
                )
            try:
                async with asyncio.timeout(0.05):
                    await self._was_warm.wait()
            except TimeoutError:
                continue

    async def _start(self) -> ProvidedDesktop:
        self.num_starts += 1
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._provider.start(self.replica_id)
        except TimeoutError as error:
            raise ReplicaError(f"replica {self.replica_id} did not start within {START_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ReplicaError(f"this machine cannot start replica {self.replica_id}: {error}") from error

    async def _lend(self, desktop: ProvidedDesktop) -> None:
        """Offers one lease after the other; returns when the desktop is not usable any more."""
        while True:
            lease = Lease(replica_id=self.replica_id, desktop=desktop)
            self._lease = lease
            self._enter("warm")
            self._was_warm.set()
            self._offer(lease)
            try:
                await lease.watch()
            finally:
                lease.fail(f"the desktop of replica {self.replica_id} was stopped with the server")
                self._withdraw(lease)
                self.num_served += lease.taken_at is not None
                self._lease = None
                self._enter("resetting")
            if lease.failure is not None:
                self._failed(lease.failure)
                log.warning("replica %s is replaced: %s", self.replica_id, lease.failure)
                return
            try:
                async with asyncio.timeout(self._reset_timeout_s):
                    await desktop.reset()
            except (ReplicaError, DependencyError, OSError) as error:  # TimeoutError is an OSError
                self._failed(str(error) or f"its reset took more than {self._reset_timeout_s:g} s")
                log.warning("replica %s is replaced, its reset failed: %s", self.replica_id, error or "timeout")
                return

    def _enter(self, phase: ReplicaState) -> None:
        self._phase, self._phase_since = phase, time.monotonic()

    def _failed(self, reason: str) -> None:
        self.num_failures += 1
        self.last_error = reason
        self._enter("failed")

    async def _stop(self, desktop: ProvidedDesktop) -> None:
        # Shielded, so that a cancelled pool still leaves no process behind; limited, so that it ends.
        stopping = asyncio.ensure_future(desktop.stop())
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
            raise
        except (ReplicaError, OSError) as error:
            log.error("replica %s did not stop cleanly: %s", self.replica_id, error or "timeout")
