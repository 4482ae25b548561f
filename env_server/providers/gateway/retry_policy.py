"""How long to wait before asking a gateway again: a backoff with jitter and a cap, and one gate for all who wait for
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
"""A gateway that asks for more is not believed: its quota may be free sooner."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Doubles up to a cap; of each wait at least half, the rest at random, so that no two askers stay in step."""

    first_s: float = 0.5
    cap_s: float = 20.0

    def wait_s(self, attempt: int, *, asked_s: float | None = None, share: float = 1.0) -> float:
        """Before attempt number `attempt` + 1; `share` (0..1) is the random part. What the gateway asked for is never
        undercut, and is spread by a tenth."""
        own_s = min(self.cap_s, self.first_s * 2.0 ** min(attempt, 30)) * (0.5 + 0.5 * share)
        if asked_s is None:
            return own_s
        return min(max(asked_s, 0.0), MAX_RETRY_AFTER_S) * (1.0 + 0.1 * share) + 0.05 * share


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a failed call is sent again, and when. The clock, sleep and chance are the tests' to replace."""

    num_attempts: int = 4
    """Of one call that the gateway failed; a busy gateway is asked until the time is up."""
    backoff: Backoff = Backoff()
    clock: Clock = time.monotonic
    sleep: Sleep = asyncio.sleep
    chance: Callable[[], float] = random.random

    async def wait(self, error: SandboxBusyError | SandboxFailedError, attempt: int, *, deadline: float) -> None:
        """Until the call may be sent again.

        Raises:
            The error itself: that moment lies beyond the deadline (by this clock), or the attempts are used up.
        """
        asked_s = error.retry_after_s if isinstance(error, SandboxBusyError) else None
        if isinstance(error, SandboxFailedError) and attempt + 1 >= self.num_attempts:
            raise error
        wait_s = self.backoff.wait_s(attempt, asked_s=asked_s, share=self.chance())
        if self.clock() + wait_s >= deadline:
            raise error
        await self.sleep(wait_s)


class QuotaGate:
    """Closed while the gateway has said that there is no sandbox to be had: who comes then waits like the one who was
    told, holding nothing, and does not ask."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy
        self._closed_until = 0.0
        self._num_refused = 0
        self.num_waiting = 0

    async def wait(self, *, deadline: float) -> bool:
        """Returns when it is open; False where that lies beyond the deadline, after having waited until then."""
        retry_policy = self._retry_policy
        self.num_waiting += 1
        try:
            while (now := retry_policy.clock()) < self._closed_until:
                if now >= deadline:
                    return False
                # Not all in the same moment.
                until = self._closed_until + 0.25 * retry_policy.chance() * retry_policy.backoff.first_s
                await retry_policy.sleep(max(0.001, min(until, deadline) - now))
            return True
        finally:
            self.num_waiting -= 1

    def refused(self, error: SandboxBusyError) -> None:
        """The gateway has said no."""
        wait_s = self._retry_policy.backoff.wait_s(
            self._num_refused, asked_s=error.retry_after_s, share=self._retry_policy.chance()
        )
        self._num_refused += 1
        self._closed_until = max(self._closed_until, self._retry_policy.clock() + wait_s)

    def granted(self) -> None:
        """The gateway has given a sandbox."""
        self._num_refused = 0
