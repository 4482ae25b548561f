"""The pool: warm desktops, fair and bounded waiting, replacement of dead desktops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_desktops import FakeDesktop, FakeProvider, fake_pool, until

from env_server.replicas.fair_queue import FairQueue
from env_server.replicas.pool import Pool
from osworld_pipeline.errors import DependencyError, NoCapacityError, ReplicaError


class Latecomer(FakeProvider):
    """The start of the second replica waits until `is_late` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = asyncio.Event()

    async def start(self, replica_id: str) -> FakeDesktop:
        if replica_id == "fake-1":
            await self.is_late.wait()
        return await super().start(replica_id)


@asynccontextmanager
async def started(pool: Pool) -> AsyncIterator[Pool]:
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_start_returns_when_every_replica_is_warm() -> None:
    async with started(fake_pool(FakeProvider(), 3)) as pool:
        assert pool.num_free == 3


async def test_released_desktop_is_reset_and_free_again() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider)) as pool:
        async with pool.lease_replica("a") as lease:
            assert pool.num_free == 0
            assert lease.desktop is provider.desktops[0]
        await until(lambda: pool.num_free == 1)
    assert [desktop.num_resets for desktop in provider.desktops] == [1]


async def test_a_fault_of_the_machine_during_a_reset_is_recorded_and_the_replica_is_rebuilt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = FakeProvider()
    provider.prepare = lambda desktop: setattr(desktop, "reset_error", OSError(24, "Too many open files"))
    async with started(fake_pool(provider)) as pool:
        provider.failures.append(OSError(28, "No space left on device"))
        async with pool.lease_replica("a"):
            pass
        await until(lambda: pool.num_free == 1)
        assert pool.replicas[0].num_failures == 2
        assert "fake-0 is replaced, its reset failed: [Errno 24] Too many open files" in caplog.text
        assert "this machine cannot start replica fake-0: [Errno 28] No space left" in caplog.text
    assert len(provider.desktops) == 2
    assert all(desktop.is_stopped for desktop in provider.desktops)


async def test_wait_for_a_replica_is_bounded() -> None:
    async with started(fake_pool(FakeProvider(), queue_timeout_s=0.05)) as pool, pool.lease_replica("a"):
        with pytest.raises(NoCapacityError, match=r"none of the 1 replicas became free within 0\.05 s"):
            async with pool.lease_replica("b"):
                pass
        assert pool.num_free == 0


async def test_retry_after_grows_with_the_queue_and_with_how_long_leases_take_and_is_bounded() -> None:
    async with started(fake_pool(FakeProvider(), queue_timeout_s=30.0)) as pool:
        assert pool.retry_after_s() == 1, "nothing is known yet"
        async with pool.lease_replica("a"):
            await asyncio.sleep(0.6)
        await until(lambda: pool.num_free == 1)
        async with pool.lease_replica("a"):
            waiting = [asyncio.create_task(pool._take("b", 30.0)) for _ in range(4)]
            await until(lambda: pool.num_waiting == 4)
            assert 2 <= pool.retry_after_s() <= 4
            waiting += [asyncio.create_task(pool._take("b", 30.0)) for _ in range(100)]
            await until(lambda: pool.num_waiting == 104)
            assert pool.retry_after_s() == 30
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_state_of_a_replica_is_reported_from_start_to_replacement() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider)) as pool:
        (replica,) = pool.replicas
        assert (replica.state, replica.num_starts, replica.num_served) == ("warm", 1, 0)
        provider.desktops[0].reset_delay_s = 0.1
        async with pool.lease_replica("a"):
            assert (replica.state, replica.desktop) == ("leased", provider.desktops[0])
            leased_since = replica.state_since
        await until(lambda: replica.state == "resetting")
        assert replica.desktop is None, "nobody looks at a desktop that is being reset"
        await until(lambda: replica.state == "warm")
        assert (replica.num_served, replica.num_failures, replica.last_error) == (1, 0, None)
        assert replica.state_since > leased_since
        provider.failures = [ReplicaError("no memory")]
        provider.desktops[0].alive = False
        await until(lambda: replica.state == "failed")
        await until(lambda: replica.state == "warm")
        assert (replica.num_starts, replica.num_failures, replica.last_error) == (3, 2, "no memory")


async def test_live_lease_is_never_taken_away() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider, queue_timeout_s=0.05)) as pool, pool.lease_replica("a") as lease:
        for _ in range(3):
            with pytest.raises(NoCapacityError):
                async with pool.lease_replica("b"):
                    pass
        assert not lease.is_over
        assert provider.desktops[0].num_resets == 0


async def test_clients_take_turns_and_each_is_served_in_its_order() -> None:
    served: list[str] = []

    async def take(pool: Pool, client: str, name: str) -> None:
        async with pool.lease_replica(client):
            served.append(name)

    async with started(fake_pool(FakeProvider(), queue_timeout_s=2.0)) as pool:
        async with pool.lease_replica("greedy"):
            waiting = []
            for client, name in (("greedy", "g1"), ("greedy", "g2"), ("greedy", "g3"), ("modest", "m1")):
                waiting.append(asyncio.create_task(take(pool, client, name)))
                await asyncio.sleep(0)
        await asyncio.gather(*waiting)
    assert served == ["g1", "m1", "g2", "g3"]


async def test_dead_desktop_is_replaced_while_it_is_not_in_use() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider)) as pool:
        provider.desktops[0].alive = False
        await until(lambda: len(provider.desktops) == 2 and pool.num_free == 1)
        assert provider.desktops[0].is_stopped
        async with pool.lease_replica("a") as lease:
            assert lease.desktop is provider.desktops[1]


async def test_dead_desktop_is_replaced_while_its_holder_still_holds_it() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider)) as pool, pool.lease_replica("a") as lease:
        provider.desktops[0].alive = False
        await until(lambda: pool.num_free == 1)
        assert lease.failure is not None
        async with pool.lease_replica("b") as second:
            assert second.desktop is provider.desktops[1]
    assert provider.desktops[1].num_resets <= 1


async def test_desktop_that_cannot_be_reset_is_replaced() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider)) as pool:
        async with pool.lease_replica("a") as lease:
            provider.desktops[0].alive = False
            lease.release()
        await until(lambda: pool.num_free == 1)
        assert len(provider.desktops) == 2


async def test_replica_that_fails_to_start_once_is_tried_again() -> None:
    provider = FakeProvider()
    provider.failures = [ReplicaError("no answer")]
    async with started(fake_pool(provider)) as pool:
        assert pool.num_free == 1


async def test_desktop_that_can_never_start_fails_the_start_with_its_reason() -> None:
    provider = FakeProvider()
    provider.failures = [DependencyError("Xvfb is missing")] * 50
    with pytest.raises(DependencyError, match="Xvfb is missing"):
        async with started(fake_pool(provider)):
            pass
    assert provider.is_closed


async def test_start_waits_for_a_late_replica_and_at_its_limit_serves_those_that_are_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = Latecomer()
    pool = Pool(provider, num_replicas=2, queue_timeout_s=0.2, start_timeout_s=0.3)
    async with started(pool):
        assert pool.num_free == 1
        assert "1 of 2 replicas are not warm after 0.3 s" in caplog.text
        async with pool.lease_replica("a"):
            provider.is_late.set()
            async with pool.lease_replica("b") as other:
                assert other.replica_id == "fake-1"
    punctual = Latecomer()
    asyncio.get_running_loop().call_later(0.1, punctual.is_late.set)
    async with started(Pool(punctual, num_replicas=2, start_timeout_s=5.0)) as pool:
        assert pool.num_free == 2, "waited for"


async def test_start_without_any_replica_fails_at_its_limit() -> None:
    provider = FakeProvider()
    provider.failures = [ReplicaError("no quota")] * 100
    with pytest.raises(ReplicaError, match="no quota"):
        async with started(Pool(provider, num_replicas=2, start_timeout_s=0.2)):
            pass
    assert provider.is_closed


async def test_close_stops_every_desktop_even_under_a_live_lease() -> None:
    provider = FakeProvider()
    pool = fake_pool(provider, 2)
    await pool.start()
    async with pool.lease_replica("a"):
        await pool.close()
    assert [desktop.is_stopped for desktop in provider.desktops] == [True, True]
    assert provider.is_closed


async def test_a_client_may_wait_less_long_than_the_pool_allows_but_not_longer() -> None:
    async with started(fake_pool(FakeProvider(), queue_timeout_s=0.2)) as pool, pool.lease_replica("a"):
        for queue_s, expected in ((0.05, r"0\.05 s"), (30.0, r"0\.2 s")):
            with pytest.raises(NoCapacityError, match=f"became free within {expected}"):
                async with pool.lease_replica("b", queue_s=queue_s):
                    pass


async def test_a_cordoned_pool_grants_no_lease_until_it_is_opened_again() -> None:
    async with started(fake_pool(FakeProvider(), queue_timeout_s=30.0)) as pool:
        async with pool.lease_replica("a"):
            waiting = asyncio.create_task(pool._take("b", 30.0))
            await asyncio.sleep(0)
            pool.cordon(is_cordoned=True)
            with pytest.raises(NoCapacityError, match="takes no new episodes at present"):
                await waiting
        await until(lambda: pool.num_free == 1)
        with pytest.raises(NoCapacityError, match="takes no new episodes at present"):
            async with pool.lease_replica("b"):
                pass
        pool.cordon(is_cordoned=False)
        async with pool.lease_replica("b"):
            assert not pool.is_draining


async def test_draining_answers_waiting_clients_at_once() -> None:
    async with started(fake_pool(FakeProvider(), queue_timeout_s=30.0)) as pool, pool.lease_replica("a"):

        async def wait() -> None:
            async with pool.lease_replica("b"):
                pass

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        pool.drain()
        with pytest.raises(NoCapacityError, match="shutting down"):
            await asyncio.wait_for(waiting, 1.0)


async def test_no_desktop_is_lost_when_a_client_gives_up_while_it_is_being_served() -> None:
    provider = FakeProvider()
    async with started(fake_pool(provider, queue_timeout_s=30.0)) as pool:

        async def wait() -> None:
            async with pool.lease_replica("b"):
                await asyncio.sleep(30)

        async with pool.lease_replica("a"):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
        # Cancelled in every phase of the hand-over: the desktop is free again in the end.
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: pool.num_free == 1)


def test_queue_takes_turns_between_clients() -> None:
    queue: FairQueue[str] = FairQueue()
    for client, item in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3"), ("c", "c1")):
        queue.push(client, item)
    queue.remove("a", "a2")
    queue.remove("a", "never there")
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "b1", "c1", "a3"]
    with pytest.raises(IndexError):
        queue.pop()
