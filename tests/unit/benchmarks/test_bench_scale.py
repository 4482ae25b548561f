"""The benchmark of scale at its smallest: a clock that jumps, the pool's own code on it, and what a replica costs."""

import asyncio
import time
from dataclasses import replace

import pytest

from benchmarks import bench_scale
from benchmarks.scale_clock import NothingWillHappenError, run_in_virtual_time
from benchmarks.scale_cost import HostKind, Need, cost_of, disk_saved_share
from benchmarks.scale_simulation import Failures, Fleet, Times, simulate
from env_server.replicas import pool, replica

FLEET = Fleet(num_hosts=2, replicas_per_host=3, num_policies=6, cores_per_host=2, simulated_s=200.0)
TIMES = Times(start_s=(1.0, 2.0), reset_s=(0.5,), episode_s=(10.0, 20.0))
NEVER = Failures(desktop_mtbf_s=1e9, failed_start_share=0.0, host_mtbf_s=1e9)


def test_virtual_hours_pass_at_once_and_the_pool_sees_them() -> None:
    async def wait() -> tuple[float, float]:
        before = pool.time.monotonic()
        async with asyncio.timeout(7200):
            await asyncio.sleep(3600)
        return pool.time.monotonic() - before, asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run_in_virtual_time(wait, pool) == pytest.approx((3600.0, 3600.0))
    assert time.perf_counter() - started < 5
    assert pool.time is replica.time is time


def test_timeouts_fire_and_a_task_that_never_ends_is_an_error() -> None:
    async def late() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(6)

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run_in_virtual_time(late)
    with pytest.raises(NothingWillHappenError):
        run_in_virtual_time(never)


def test_replicas_without_faults_are_always_in_use_except_for_resets() -> None:
    report = simulate(replace(FLEET, num_hosts=1, replicas_per_host=6), TIMES, NEVER)
    # Episodes of 15 s on average and resets of 0.5 s: six replicas serve at most 6 * 200 / 15.5 of them.
    assert report.num_episodes == pytest.approx(6 * 200 / 15.5, abs=8)
    assert report.busy_share == pytest.approx(15 / 15.5, abs=0.08)
    assert not report.faults
    assert not report.recovery_s


def test_the_same_seed_gives_the_same_report() -> None:
    failures = Failures(desktop_mtbf_s=100.0, host_mtbf_s=150.0, host_down_s=20.0)
    first, second = (simulate(FLEET, TIMES, failures, seed=3) for _ in range(2))
    assert replace(first, took_s=0.0) == replace(second, took_s=0.0)
    assert replace(simulate(FLEET, TIMES, failures, seed=4), took_s=0.0) != replace(first, took_s=0.0)


def test_dead_desktops_and_hosts_cost_episodes_and_come_back() -> None:
    calm = simulate(FLEET, TIMES, NEVER)
    failures = Failures(desktop_mtbf_s=60.0, failed_start_share=0.1, host_mtbf_s=120.0, host_down_s=20.0)
    stormy = simulate(FLEET, TIMES, failures)
    assert stormy.faults["desktop died"] > 0
    assert stormy.num_host_failures > 0
    assert len(stormy.recovery_s) > 0
    assert max(stormy.recovery_s) < 120
    assert 0.3 * calm.num_episodes < stormy.num_episodes < calm.num_episodes


def test_more_policies_than_replicas_wait_their_turn_or_are_refused() -> None:
    report = simulate(replace(FLEET, num_policies=18, queue_timeout_s=12.0), TIMES, NEVER)
    assert report.faults["refused: no replica in time"] > 0
    assert max(report.lease_wait_s) > 10
    assert report.busy_share > 0.85
    assert len(report.episodes_by_client) == 8
    assert min(report.episodes_by_client.values()) >= 1


def test_the_rent_of_a_host_is_shared_by_as_many_replicas_as_fit() -> None:
    host = HostKind(cores=64, memory_gb=512, usd_per_hour=4.0)
    light = cost_of(Need(memory_mb=450, cores=0.01), host)
    assert (light.per_host, light.num_hosts, light.limited_by) == (1024, 1, "memory")
    assert light.usd_per_replica_day == pytest.approx(96 / 1024)
    busy = cost_of(Need(memory_mb=450, cores=0.5), host)
    assert (busy.per_host, busy.num_hosts, busy.limited_by) == (102, 11, "CPU")
    with pytest.raises(ValueError, match="does not fit"):
        cost_of(Need(memory_mb=600_000, cores=0.1), host)
    with pytest.raises(ValueError, match="needs memory and CPU"):
        cost_of(Need(memory_mb=0, cores=0.1), host)


def test_a_shared_image_saves_all_copies_but_one() -> None:
    assert disk_saved_share(shared_mb=800, own_mb=1, num_replicas=64) == pytest.approx(1 - 864 / (64 * 801))
    assert disk_saved_share(shared_mb=800, own_mb=1, num_replicas=1) == 0.0


def test_the_quick_option_makes_a_short_run_and_a_wrong_option_is_refused() -> None:
    quick = bench_scale._parse(["--quick", "--hosts", "3"])
    assert (quick.replicas, quick.hosts, quick.replicas_per_host, quick.qemu) == ([1], 3, 8, False)
    full = bench_scale._parse([])
    assert full.hosts * full.replicas_per_host == bench_scale.NUM_REPLICAS
    with pytest.raises(SystemExit):
        bench_scale._parse(["--speed"])
