"""The wait before a retry at a gateway: a backoff with jitter and a cap, and one gate for all replicas that wait for
the same quota."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from env_server.providers.gateway.client import SandboxBusyError, SandboxFailedError

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
MAX_RETRY_AFTER_S = 600.0
"""A longer Retry-After of the gateway is reduced to this, because its quota may be free sooner."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Doubles up to a cap; at least half of each wait is fixed, the rest random, so that clients do not synchronise."""

    first_s: float = 0.5
    cap_s: float = 20.0

    def wait_s(self, attempt: int, *, asked_s: float | None = None, share: float = 1.0) -> float:
        """The wait after attempt number `attempt`, counted from 0; `share` (0..1) is the random part. A delay that the
        gateway requested is reduced only to MAX_RETRY_AFTER_S, and is extended by about a tenth at most."""
        own_s = min(self.cap_s, self.first_s * 2.0 ** min(attempt, 30)) * (0.5 + 0.5 * share)
        if asked_s is None:
            return own_s
        return min(max(asked_s, 0.0), MAX_RETRY_AFTER_S) * (1.0 + 0.1 * share) + 0.05 * share


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a failed call is sent again, and when. Tests replace the clock, sleep and chance."""

    num_attempts: int = 4
    """Most attempts of a call if the gateway fails; calls to a busy gateway are repeated until the time is up."""
    backoff: Backoff = Backoff()
    clock: Clock = time.monotonic
    sleep: Sleep = asyncio.sleep
    chance: Callable[[], float] = random.random

    async def wait(self, error: SandboxBusyError | SandboxFailedError, attempt: int, *, deadline: float) -> None:
        """Waits until the call may be sent again.

        Raises:
            The error itself: that moment is after the deadline (by this clock), or the attempts are used up.
        """
        asked_s = error.retry_after_s if isinstance(error, SandboxBusyError) else None
        if isinstance(error, SandboxFailedError) and attempt + 1 >= self.num_attempts:
            raise error
        wait_s = self.backoff.wait_s(attempt, asked_s=asked_s, share=self.chance())
        if self.clock() + wait_s >= deadline:
            raise error
        await self.sleep(wait_s)


class QuotaGate:
    """Closed after the gateway has reported that no sandbox is available: further replicas then wait like the one that
    was refused, hold nothing, and send no request."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy
        self._closed_until = 0.0
        self._num_refused = 0
        self.num_waiting = 0

    async def wait(self, *, deadline: float) -> bool:
        """Returns True when the gate is open, or False at the deadline if it is still closed."""
        retry_policy = self._retry_policy
        self.num_waiting += 1
        try:
            while (now := retry_policy.clock()) < self._closed_until:
                if now >= deadline:
                    return False
                # Spreads the waiters over time.
                until = self._closed_until + 0.25 * retry_policy.chance() * retry_policy.backoff.first_s
                await retry_policy.sleep(max(0.001, min(until, deadline) - now))
            return True
        finally:
            self.num_waiting -= 1

    def refused(self, error: SandboxBusyError) -> None:
        """Closes the gate, because the gateway has refused a sandbox."""
        wait_s = self._retry_policy.backoff.wait_s(
            self._num_refused, asked_s=error.retry_after_s, share=self._retry_policy.chance()
        )
        self._num_refused += 1
        self._closed_until = max(self._closed_until, self._retry_policy.clock() + wait_s)

    def granted(self) -> None:
        """Resets the backoff, because the gateway has returned a sandbox."""
        self._num_refused = 0
