"""The table of live episodes: resets by name, the end of unclaimed resets, and one end for each episode."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_desktops import FakeProvider, fake_pool, until
from surface_server import CRASHING, TASK, write_yes

from env_server.episodes.episode import Episode
from env_server.episodes.table import UNCLAIMED_S, EpisodeEnd, EpisodeTable, Opened
from env_server.main import make_drivers
from env_server.replicas.pool import Pool
from env_server.server_settings import ServerSettings
from osworld_pipeline.errors import EvaluatorError, NoCapacityError, ReplicaError, SetupError, TaskError
from osworld_pipeline.wire import EnvConfig

SLOW: dict[str, Any] = {**TASK, "config": [{"type": "sleep", "parameters": {"seconds": 0.4}}]}


@dataclass(kw_only=True)
class Table:
    episodes: EpisodeTable
    pool: Pool
    provider: FakeProvider
    ends: list[EpisodeEnd] = field(default_factory=list)

    async def open(self, task: dict[str, Any] | None = None, request_id: str = "", client_id: str = "c") -> Opened:
        return await self.episodes.open(task or TASK, EnvConfig(), client_id=client_id, request_id=request_id)

    def outcomes(self) -> list[str]:
        assert len({end.episode_id for end in self.ends}) == len(self.ends), "one end for each"
        return [end.outcome for end in self.ends]


@asynccontextmanager
async def a_table(num_replicas: int = 1, *, unclaimed_s: float = 0.1) -> AsyncIterator[Table]:
    provider, ends, settings = FakeProvider(), list[EpisodeEnd](), ServerSettings.from_environment({}, idle_ttl_s=0.2)
    pool = fake_pool(provider, num_replicas)
    episodes = EpisodeTable(pool, settings, make_drivers(settings), on_end=ends.append, unclaimed_s=unclaimed_s)
    try:
        await pool.start()
        yield Table(episodes=episodes, pool=pool, provider=provider, ends=ends)
        await episodes.close_all("the test is over")
        assert len(ends) == episodes.num_opened, "every episode that got a desktop has ended"
        await episodes.drivers.close()
    finally:
        await pool.close()


async def test_named_reset_sent_twice_gets_one_episode() -> None:
    async with a_table(2) as table:
        first, second = await asyncio.gather(table.open(request_id="r"), table.open(request_id="r"))
        third = await table.open(request_id="r")
        assert first == second == third
        assert (len(table.episodes), table.pool.num_free) == (1, 1)


async def test_name_of_a_reset_is_valid_only_for_its_client() -> None:
    async with a_table(2) as table:
        first, _ = await table.open(request_id="r", client_id="a")
        second, _ = await table.open(request_id="r", client_id="b")
        assert first.episode_id != second.episode_id


async def test_name_is_free_again_when_its_episode_has_acted_or_is_closed() -> None:
    async with a_table(3) as table:
        first, _ = await table.open(request_id="r")
        await first.step("WAIT", pause_s=0.0)
        second, _ = await table.open(request_id="r")
        assert second is not first
        await table.episodes.close(second.episode_id)
        third, _ = await table.open(request_id="r")
        assert third is not second


async def test_named_reset_that_failed_is_tried_again() -> None:
    async with a_table() as table:
        table.provider.desktops[0].alive = False
        with pytest.raises(ReplicaError):
            await table.open(request_id="r")
        await until(lambda: table.pool.num_free == 1)
        await table.open(request_id="r")
        assert table.outcomes() == ["env_fault"]


async def test_client_that_disconnected_and_asks_again_gets_the_episode_that_was_being_opened() -> None:
    async with a_table(unclaimed_s=5.0) as table:
        asking = asyncio.create_task(table.open(SLOW, request_id="r"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait({asking})
        await table.open(SLOW, request_id="r")
        assert (table.episodes.num_opened, table.ends) == (1, [])


async def test_unclaimed_named_reset_gives_its_desktop_back_while_it_is_being_opened() -> None:
    async with a_table() as table:
        asking = asyncio.create_task(table.open(SLOW, request_id="r"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: table.pool.num_free == 1)
        assert table.outcomes() == ["client_gone"]


async def test_unclaimed_named_reset_gives_its_desktop_back_after_it_was_opened() -> None:
    """Its client disconnects while the episode is opened, and the episode is ready only after that."""
    async with a_table(unclaimed_s=0.8) as table:
        asking = asyncio.create_task(table.open(SLOW, request_id="r"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: len(table.episodes) == 1)
        await until(lambda: table.pool.num_free == 1)
        assert table.outcomes() == ["client_gone"]


async def test_claimed_episode_is_kept_although_the_client_of_its_first_request_disconnected() -> None:
    async with a_table(unclaimed_s=0.1) as table:
        asking = asyncio.create_task(table.open(SLOW, request_id="r"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(table.open(SLOW, request_id="r"))
        asking.cancel()
        episode, _ = await second
        table.episodes.hang_up("c", "r")
        await asyncio.sleep(0.01)
        await episode.step("WAIT", pause_s=0.0)
        await asyncio.sleep(0.2)
        assert table.ends == []


def test_unclaimed_desktop_is_free_within_five_seconds() -> None:
    assert UNCLAIMED_S < 4.5


async def test_each_kind_of_end_is_reported_once_and_by_its_name() -> None:
    async with a_table() as table:
        for ending, outcome in (
            (lambda episode: table.episodes.close(episode.episode_id), "closed"),
            (evaluate, "evaluated"),
            (crash_the_grader, "grader_fault"),
            (lambda _: kill(table), "env_fault"),
            (lambda _: abandon(table), "idle"),
            (lambda _: table.episodes.close_all("the end"), "shutdown"),
        ):
            await until(lambda: table.pool.num_free == 1)
            episode, _ = await table.open(CRASHING if outcome == "grader_fault" else TASK)
            write_yes(table.provider.of("fake-0"))
            await ending(episode)
            with_same_id = table.episodes.close(episode.episode_id)
            await with_same_id
            assert table.outcomes()[-1] == outcome
            assert table.ends[-1].task_id == "t1"
        assert len(table.ends) == 6


async def evaluate(episode: Any) -> None:
    assert await episode.evaluate() == 1.0


async def crash_the_grader(episode: Any) -> None:
    with pytest.raises(EvaluatorError):
        await episode.evaluate()


async def kill(table: Table) -> None:
    table.provider.of("fake-0").alive = False
    await until(lambda: table.pool.num_free == 1)


async def abandon(table: Table) -> None:
    await asyncio.sleep(0.25)
    assert await table.episodes.reap_idle() == 1


async def test_set_up_that_fails_ends_the_episode_as_a_fault_and_a_refused_task_opens_no_episode() -> None:
    files = [{"url": "http://no.test/", "path": "a"}]
    async with a_table() as table:
        with pytest.raises(SetupError):
            await table.open({**TASK, "config": [{"type": "download", "parameters": {"files": files}}]})
        with pytest.raises(TaskError):
            await table.open({**TASK, "evaluator": None})
        assert table.outcomes() == ["env_fault"]
        assert table.episodes.outcomes == {"env_fault": 1}


async def test_episode_that_is_opened_while_the_server_closes_ends_too() -> None:
    async with a_table() as table:
        opening = asyncio.create_task(table.open(SLOW))
        await asyncio.sleep(0.1)
        assert table.episodes.num_calls == 1
        await table.episodes.close_all("the end")
        with pytest.raises(NoCapacityError, match="shutting down"):
            await opening
        assert (len(table.episodes), table.outcomes(), table.episodes.num_calls) == (0, ["shutdown"], 0)


async def test_desktop_that_dies_under_an_idle_episode_is_replaced_at_once() -> None:
    async with a_table() as table:
        await table.open()
        killed_at = time.monotonic()
        table.provider.of("fake-0").alive = False
        await until(lambda: table.pool.num_free == 1)
        assert time.monotonic() - killed_at < 5.0


@pytest.mark.parametrize("num_turns", range(8))
async def test_reset_cancelled_just_as_its_episode_is_ready_has_one_end(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_turns` turns of the event loop pass before the cancellation."""
    prepare, loop = Episode.prepare, asyncio.get_running_loop()

    def cancel_in(turns: int) -> None:
        if turns:
            loop.call_soon(cancel_in, turns - 1)
        else:
            asking.cancel()

    async def prepare_and_cancel(episode: Episode) -> Any:
        try:
            return await prepare(episode)
        finally:
            cancel_in(num_turns)

    monkeypatch.setattr(Episode, "prepare", prepare_and_cancel)
    async with a_table() as table:
        asking = asyncio.create_task(table.open())
        await asyncio.wait({asking})
        if not asking.cancelled():
            await table.episodes.close(asking.result()[0].episode_id, "it was opened")
        assert (len(table.ends), table.episodes.num_opened) == (1, 1)
