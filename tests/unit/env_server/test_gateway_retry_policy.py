"""Waits are jittered, capped and bounded; all callers share one wait for quota."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.providers.gateway.client import SandboxBusyError, SandboxFailedError
from env_server.providers.gateway.retry_policy import MAX_RETRY_AFTER_S, Backoff, QuotaGate, RetryPolicy


class StillTime:
    """A clock that advances only during a sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def retry_policy(self, **options: Any) -> RetryPolicy:
        return RetryPolicy(clock=lambda: self.now, sleep=self.sleep, chance=lambda: 0.5, **options)


@given(attempt=st.integers(0, 10_000), share=st.floats(0, 1))
def test_a_wait_is_between_half_and_all_of_a_capped_doubling(attempt: int, share: float) -> None:
    wait_s = Backoff(first_s=0.5, cap_s=20.0).wait_s(attempt, share=share)
    whole_s = min(20.0, 0.5 * 2 ** min(attempt, 30))
    assert whole_s / 2 <= wait_s <= whole_s


@given(attempt=st.integers(0, 10_000), asked_s=st.floats(0, 1e12), share=st.floats(0, 1))
def test_a_wait_is_never_shorter_than_the_gateway_asks_for_and_never_unbounded(
    attempt: int, asked_s: float, share: float
) -> None:
    wait_s = Backoff().wait_s(attempt, asked_s=asked_s, share=share)
    assert min(asked_s, MAX_RETRY_AFTER_S) <= wait_s <= 1.1 * MAX_RETRY_AFTER_S + 0.05


async def test_two_callers_refused_at_the_same_time_do_not_retry_at_the_same_time() -> None:
    shares = iter([0.1, 0.9])
    waits = [Backoff().wait_s(3, share=next(shares)) for _ in range(2)]
    assert waits[0] != waits[1]


async def test_a_failed_call_is_sent_again_up_to_its_attempts_and_its_last_error_is_raised() -> None:
    time, error = StillTime(), SandboxFailedError("broken")
    retry_policy = time.retry_policy(num_attempts=3)
    await retry_policy.wait(error, 0, deadline=1e9)
    await retry_policy.wait(error, 1, deadline=1e9)
    with pytest.raises(SandboxFailedError, match="broken"):
        await retry_policy.wait(error, 2, deadline=1e9)
    assert time.slept == [0.375, 0.75]


async def test_no_wait_starts_that_would_end_after_the_deadline() -> None:
    time = StillTime()
    with pytest.raises(SandboxBusyError):
        await time.retry_policy().wait(SandboxBusyError("full", retry_after_s=30), 0, deadline=time.now + 20)
    assert time.slept == []


async def test_one_refusal_makes_all_callers_wait_for_as_long_as_the_gateway_said() -> None:
    time = StillTime()
    gate = QuotaGate(time.retry_policy())
    gate.refused(SandboxBusyError("full", retry_after_s=30))
    began = time.now
    assert await gate.wait(deadline=began + 100)
    assert 30 <= time.now - began <= 35
    began = time.now
    assert await gate.wait(deadline=began + 100)
    assert time.now == began


async def test_a_wait_for_quota_ends_with_its_budget() -> None:
    time = StillTime()
    gate = QuotaGate(time.retry_policy())
    gate.refused(SandboxBusyError("full", retry_after_s=500))
    assert not await gate.wait(deadline=time.now + 20)
    assert sum(time.slept) == pytest.approx(20)
    assert gate.num_waiting == 0


async def test_waits_after_refusals_without_a_time_grow_until_a_start_is_granted() -> None:
    time = StillTime()
    gate = QuotaGate(time.retry_policy())
    waits = []
    for refused in (True, True, True, False, True):
        if not refused:
            gate.granted()
            continue
        began = time.now
        gate.refused(SandboxBusyError("full"))
        await gate.wait(deadline=1e9)
        waits.append(time.now - began)
    assert waits[0] < waits[1] < waits[2]
    assert waits[3] == pytest.approx(waits[0])
