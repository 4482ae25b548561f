"""A keeper starts its servers, restarts those that end, and gives up when none can start."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from osworld_pipeline.errors import EngineError, EnvServerError
from osworld_pipeline.runs.rollouts import keeper as keeper_module
from osworld_pipeline.runs.rollouts.keeper import Keeper


class Server:
    def __init__(self, url: str) -> None:
        self.url, self.end, self.was_stopped = url, asyncio.Event(), False

    async def ended(self) -> str:
        await self.end.wait()
        return f"{self.url} crashed"

    async def stop(self) -> None:
        self.was_stopped = True


class Machines:
    """`room`: how many servers find a machine; the others wait. `is_broken`: every start fails."""

    def __init__(self, room: int = 100, *, is_broken: bool = False) -> None:
        self.room, self.is_broken = asyncio.Semaphore(room), is_broken
        self.started: list[Server] = []
        self.numbers: list[int] = []
        self.num_tries = 0

    async def __call__(self, number: int) -> Server:
        self.num_tries += 1
        if self.is_broken:
            raise EnvServerError("bwrap is missing")
        await self.room.acquire()
        self.numbers.append(number)
        self.started.append(Server(f"http://host:{len(self.started)}"))
        return self.started[-1]


def keeper_of(count: int, start: Callable[[int], Awaitable[Server]]) -> Keeper[Server]:
    return Keeper(count, start, kind="env server", error=EnvServerError)


def urls(keeper: Keeper[Server]) -> list[str]:
    return [server.url for server in keeper.running]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(keeper_module, "LAST_PAUSE_S", 0.05)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - the state of other tasks
            await asyncio.sleep(0.005)


async def test_every_server_is_started_by_its_number_and_stopped_at_the_end() -> None:
    machines = Machines()
    keeper = keeper_of(3, machines)
    await keeper.open()
    await keeper.wait_ready(10)
    await until(lambda: len(urls(keeper)) == 3)
    assert sorted(machines.numbers) == [0, 1, 2]
    await keeper.close()
    assert urls(keeper) == []
    assert all(server.was_stopped for server in machines.started)


async def test_a_server_that_ends_is_started_again_at_another_address() -> None:
    machines = Machines()
    keeper = keeper_of(2, machines)
    await keeper.open()
    await until(lambda: len(urls(keeper)) == 2)
    machines.started[0].end.set()
    await until(lambda: len(machines.started) == 3 and len(urls(keeper)) == 2)
    assert machines.started[0].was_stopped
    assert sorted(urls(keeper)) == ["http://host:1", "http://host:2"]
    await keeper.close()


async def test_the_program_starts_with_the_servers_that_have_room_and_uses_the_others_later() -> None:
    machines = Machines(room=1)
    keeper = keeper_of(2, machines)
    await keeper.open()
    await keeper.wait_ready(10)
    assert urls(keeper) == ["http://host:0"]
    machines.room.release()
    await until(lambda: len(urls(keeper)) == 2)
    await keeper.close()


async def test_a_cluster_without_room_is_given_up_in_time() -> None:
    keeper = keeper_of(1, Machines(room=0))
    await keeper.open()
    with pytest.raises(EnvServerError, match=r"no env server started within 0\.05 s, because no node had room"):
        await keeper.wait_ready(0.05)
    await keeper.close()


async def test_servers_that_can_never_start_are_given_up_at_once_with_the_reason() -> None:
    machines = Machines(is_broken=True)
    keeper = keeper_of(2, machines)
    await keeper.open()
    async with asyncio.timeout(10):
        with pytest.raises(EnvServerError, match="no env server starts on this cluster: bwrap is missing"):
            await keeper.wait_ready(600)
    assert machines.num_tries >= 2 * keeper_module.HOPELESS_TRIES
    await keeper.close()


async def test_a_failure_of_another_kind_is_raised_unchanged() -> None:
    async def start(number: int) -> Server:
        raise EngineError("the engine does not answer")

    keeper = keeper_of(2, start)
    await keeper.open()
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match=r"^the engine does not answer$"):
            await keeper.wait_ready(600)
    await keeper.close()


async def test_servers_that_have_run_are_waited_for_even_if_they_fail_often() -> None:
    machines = Machines()
    keeper = keeper_of(1, machines)
    await keeper.open()
    await keeper.wait_ready(10)
    machines.is_broken = True
    machines.started[0].end.set()
    await until(lambda: machines.num_tries > keeper_module.HOPELESS_TRIES + 2)
    with pytest.raises(EnvServerError, match=r"no env server started within 0\.05 s: bwrap is missing"):
        await keeper.wait_ready(0.05)
    machines.is_broken = False
    await keeper.wait_ready(10)
    assert urls(keeper) == ["http://host:1"]
    await keeper.close()


async def test_a_start_is_settled_when_each_server_runs_or_has_failed() -> None:
    machines = Machines(room=1)
    keeper = keeper_of(2, machines)
    await keeper.open()
    await keeper.wait_ready(10)
    began = asyncio.get_running_loop().time()
    await keeper.wait_settled(0.1)
    assert asyncio.get_running_loop().time() - began > 0.09, "one still waits for room"
    machines.room.release()
    await keeper.wait_settled(10)
    assert len(urls(keeper)) == 2
    await keeper.close()


async def test_a_defect_ends_the_wait_and_is_not_treated_as_a_full_cluster() -> None:
    async def start(number: int) -> Server:
        raise TypeError("a defect")

    keeper = keeper_of(1, start)
    await keeper.open()
    async with asyncio.timeout(10):
        with pytest.raises(TypeError, match="a defect"):
            await keeper.wait_ready(600)
    with pytest.raises(TypeError, match="a defect"):
        assert urls(keeper)
    await keeper.close()


async def test_a_server_that_repeatedly_ends_soon_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(keeper_module, "LAST_PAUSE_S", 60.0)
    pauses: list[float] = []

    class Crashing(Server):
        async def ended(self) -> str:
            return "it crashed"

    async def start(number: int) -> Server:
        return Crashing("http://host:1")

    sleep = asyncio.sleep

    async def fake_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0 if len(pauses) < 9 else 3600)

    monkeypatch.setattr(keeper_module.asyncio, "sleep", fake_sleep)
    keeper = keeper_of(1, start)
    await keeper.open()
    async with asyncio.timeout(10):
        while len(pauses) < 9:
            await sleep(0)
    await keeper.close()
    expected = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(0.75 * one <= pause <= 1.25 * one for pause, one in zip(pauses, expected, strict=True)), pauses


async def test_a_server_that_ran_long_is_started_again_without_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "STABLE_S", 0.0)
    monkeypatch.setattr(keeper_module, "LAST_PAUSE_S", 3600.0)
    machines = Machines()
    keeper = keeper_of(1, machines)
    await keeper.open()
    for number in range(12):
        await until(lambda number=number: len(machines.started) == number + 1)
        machines.started[number].end.set()
    await keeper.close()
