"""A discrete-event simulation of a thousand replicas over many hosts: desktops start, serve, die and are replaced, and
hosts fail. Queueing, refusal and recovery are the pool's own code (env_server/replicas/) under a
virtual clock; durations are drawn from measurements, and failure rates are assumed."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.scale_clock import run_in_virtual_time
from benchmarks.spread import Spread
from env_server.guest_client import GuestClient
from env_server.replicas import pool as pool_module
from env_server.replicas import replica as replica_module
from env_server.replicas.pool import Pool
from osworld_pipeline.errors import DependencyError, NoCapacityError, ReplicaError

NUM_STEPS = 10
"""Steps of an episode; between them the policy checks that its desktop is alive."""
NUM_CLIENTS = 8
MAX_BACKOFF_S = 5.0
MAX_START_S = 24 * 3600.0
"""Simulated time limit until every host has been up once."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measured values in seconds, from which one is drawn each time."""

    start_s: Sequence[float]
    reset_s: Sequence[float]
    episode_s: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    num_hosts: int = 16
    replicas_per_host: int = 64
    num_policies: int = 1024
    """Concurrent requests for episodes."""
    cores_per_host: int = 16
    """Number of desktops of a host that can start or reset at once; the others wait."""
    queue_timeout_s: float = 60.0
    simulated_s: float = 600.0
    """Time after the hosts are up."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Assumed failure rates."""

    desktop_mtbf_s: float = 3600.0
    """Mean lifetime of a desktop."""
    failed_start_share: float = 0.01
    host_mtbf_s: float = 3 * 3600.0
    host_down_s: float = 60.0


@dataclass(kw_only=True)
class Report:
    num_episodes: int = 0
    lease_wait_s: list[float] = field(default_factory=list)
    """Time from requesting a desktop to its lease, refusals and other hosts included."""
    recovery_s: list[float] = field(default_factory=list)
    """Time from a fault during an episode to the next desktop for it."""
    faults: Counter[str] = field(default_factory=Counter)
    """Lost episodes by cause, refusals, requests to a server that was down, and failed starts of servers."""
    episodes_by_client: Counter[str] = field(default_factory=Counter)
    leased_s: float = 0.0
    num_replicas: int = 0
    num_host_failures: int = 0
    simulated_s: float = 0.0
    took_s: float = 0.0
    """Real time."""

    @property
    def episodes_per_min(self) -> float:
        return 60.0 * self.num_episodes / self.simulated_s

    @property
    def busy_share(self) -> float:
        """Share of the replicas' time in which episodes leased them."""
        return self.leased_s / (self.num_replicas * self.simulated_s)

    def fields(self) -> dict[str, Any]:
        return {
            "replicas": self.num_replicas,
            "simulated_s": self.simulated_s,
            "took_s": round(self.took_s, 1),
            "episodes_per_min": round(self.episodes_per_min, 1),
            "busy_share": round(self.busy_share, 4),
            "lease_wait_s": Spread.of(self.lease_wait_s).fields(),
            "recovery_s": Spread.of(self.recovery_s).fields() if self.recovery_s else None,
            "faults": dict(self.faults),
            "host_failures": self.num_host_failures,
            "episodes_by_client": dict(self.episodes_by_client),
        }


class Desktop:
    def __init__(self, host: "Host") -> None:
        self._host = host
        self._dies_at = host.now() + host.chance.expovariate(1.0 / host.failures.desktop_mtbf_s)

    @property
    def guest(self) -> GuestClient:
        raise AssertionError("a simulated desktop has no guest")

    async def reset(self) -> None:
        await self._host.work(self._host.times.reset_s)
        if not self.is_alive():
            raise ReplicaError("it died during its reset")

    def is_alive(self) -> bool:
        return self._host.is_up and self._host.now() < self._dies_at

    async def stop(self) -> None: ...


class Host:
    """A host, which is also its pool's provider."""

    name = "simulated"
    image_digest = "0" * 64
    details = ""

    def __init__(self, index: int, fleet: Fleet, times: Times, failures: Failures, report: Report, seed: int) -> None:
        self.name = f"host{index}"
        self.times, self.failures = times, failures
        self.chance = random.Random(f"{seed}:{index}")
        self.is_up = True
        self.pool: Pool | None = None
        """None while its server is down."""
        self._fleet, self._report = fleet, report
        self._cores = asyncio.Semaphore(fleet.cores_per_host)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def work(self, durations_s: Sequence[float]) -> None:
        async with self._cores:
            await asyncio.sleep(self.chance.choice(durations_s))

    async def start(self, replica_id: str) -> Desktop:
        await self.work(self.times.start_s)
        if not self.is_up or self.chance.random() < self.failures.failed_start_share:
            raise ReplicaError(f"{replica_id} does not start")
        return Desktop(self)

    async def close(self) -> None: ...

    async def run(self, is_ready: asyncio.Event) -> None:
        """Run a server, which restarts after each failure of its host."""
        while True:
            self.is_up = True
            pool = Pool(self, num_replicas=self._fleet.replicas_per_host, queue_timeout_s=self._fleet.queue_timeout_s)
            try:
                await pool.start()
                self.pool = pool
                is_ready.set()
                await asyncio.sleep(self.chance.expovariate(1.0 / self.failures.host_mtbf_s))
                self._report.num_host_failures += 1
            except (ReplicaError, DependencyError):
                self._report.faults["server did not start"] += 1
            finally:
                self.is_up, self.pool = False, None
                await pool.close()
            await asyncio.sleep(self.failures.host_down_s)


class Policy:
    """Requests one episode after the other. The policies of a client use the hosts in turn, like an env client, which
    does not know their load."""

    def __init__(self, index: int, client: str, turns: Iterator[Host], times: Times, report: Report, seed: int) -> None:
        self._client, self._next = client, turns
        self._times, self._report = times, report
        self._chance = random.Random(f"{seed}:policy:{index}")

    async def run(self, begins: asyncio.Event) -> None:
        await begins.wait()
        now = asyncio.get_running_loop().time
        wanted_at, lost_at = now(), None
        attempt = 0
        while True:
            host = next(self._next)
            if host.pool is None:
                self._report.faults["no server there"] += 1
                attempt += 1
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.25 * 2 ** min(attempt, 5)) * self._chance.uniform(0.75, 1.25))
                continue
            try:
                async with host.pool.lease_replica(self._client) as lease:
                    had_at = now()
                    self._report.lease_wait_s.append(had_at - wanted_at)
                    if lost_at is not None:
                        self._report.recovery_s.append(had_at - lost_at)
                    attempt = 0
                    step_s = self._chance.choice(self._times.episode_s) / NUM_STEPS
                    for _ in range(NUM_STEPS):
                        await asyncio.sleep(step_s)
                        self._report.leased_s += step_s
                        if lease.failure is not None:
                            break
                    is_lost = lease.failure is not None
            except NoCapacityError:
                self._report.faults["refused: no replica in time"] += 1
                await asyncio.sleep(host.pool.retry_after_s() if host.pool else MAX_BACKOFF_S)
                continue
            if is_lost:
                self._report.faults["desktop died" if host.is_up else "host died"] += 1
            else:
                self._report.num_episodes += 1
                self._report.episodes_by_client[self._client] += 1
            wanted_at = now()
            lost_at = wanted_at if is_lost else None


def simulate(fleet: Fleet, times: Times, failures: Failures, *, seed: int = 0) -> Report:
    """Deterministic: equal arguments give equal reports, except for `took_s`."""
    started = time.perf_counter()
    report = run_in_virtual_time(lambda: _simulate(fleet, times, failures, seed), pool_module, replica_module)
    report.took_s = time.perf_counter() - started
    return report


async def _simulate(fleet: Fleet, times: Times, failures: Failures, seed: int) -> Report:
    report = Report(num_replicas=fleet.num_hosts * fleet.replicas_per_host, simulated_s=fleet.simulated_s)
    hosts = [Host(index, fleet, times, failures, report, seed) for index in range(fleet.num_hosts)]
    up = [asyncio.Event() for _ in hosts]
    begins = asyncio.Event()
    tasks = [asyncio.create_task(host.run(is_up)) for host, is_up in zip(hosts, up, strict=True)]
    # Each client begins with a different host.
    turns = [itertools.islice(itertools.cycle(hosts), index % len(hosts), None) for index in range(NUM_CLIENTS)]
    for index in range(fleet.num_policies):
        of = index % NUM_CLIENTS
        policy = Policy(index, f"client-{of}", turns[of], times, report, seed)
        tasks.append(asyncio.create_task(policy.run(begins)))
    try:
        async with asyncio.timeout(MAX_START_S):
            await asyncio.gather(*(is_up.wait() for is_up in up))
        begins.set()
        done, _ = await asyncio.wait(tasks, timeout=fleet.simulated_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return report
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        _raise_first(cast(list[BaseException | None], results))


def _raise_first(results: list[BaseException | None]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
