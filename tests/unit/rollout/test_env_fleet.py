"""Which env server gets the next episode while servers join, fill up, drain, leave and differ."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout import env_fleet
from osworld_pipeline.rollout.env_answers import UnreachableError
from osworld_pipeline.rollout.env_fleet import EnvFleet, ServerReport
from osworld_pipeline.wire import HealthAnswer
from osworld_pipeline.wire.protocol import PROTOCOL

A, B, C = "http://a:1", "http://b:1", "http://c:1"
OURS = Grounds(image_digest="ours", grader_version="1")
OTHER = Grounds(image_digest="other", grader_version="1")


class Servers:
    """What each server answers; one that is not in `free` does not answer."""

    def __init__(self, **free: int) -> None:
        self.free = {f"http://{name}:1": number for name, number in free.items()}
        self.draining: set[str] = set()
        self.grounds: dict[str, Grounds] = {}
        self.protocols: dict[str, int] = {}

    async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
        if base_url not in self.free:
            raise EnvServerError(f"no env server answers at {base_url}")
        status = "draining" if base_url in self.draining else "ok"
        return HealthAnswer(status=status, episodes=0, replicas=8, free=self.free[base_url])

    async def report_of(self, base_url: str) -> ServerReport | None:
        protocol = self.protocols.get(base_url, PROTOCOL)
        return ServerReport(version="9.9.9", protocol=protocol, grounds=self.grounds.get(base_url, OURS))


def chosen(fleet: EnvFleet, number: int) -> Counter[str]:
    return Counter(fleet.choose().url for _ in range(number))


async def test_episodes_go_to_the_server_with_the_most_free_desktops() -> None:
    fleet = EnvFleet([A, B, C], Servers(a=8, b=2, c=0))
    await fleet.look()
    assert chosen(fleet, 6) == {A: 6}
    assert chosen(fleet, 4) == {A: 2, B: 2}, "both had two"
    assert not fleet.has_free
    assert chosen(fleet, 6) == {A: 2, B: 2, C: 2}, "nothing is free: they wait everywhere"


async def test_before_anything_is_known_servers_get_episodes_in_turn() -> None:
    fleet = EnvFleet([A, B], Servers())
    assert [fleet.choose().url for _ in range(4)] == [A, B, A, B]


async def test_a_server_that_reports_no_numbers_gets_episodes_in_turn_with_the_others() -> None:
    class Foreign(Servers):
        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            return HealthAnswer(episodes=3)

    fleet = EnvFleet([A, B], Foreign())
    await fleet.look()
    assert chosen(fleet, 6) == {A: 3, B: 3}


async def test_an_episode_that_is_over_frees_its_desktop_at_once() -> None:
    fleet = EnvFleet([A, B], Servers(a=1, b=0))
    await fleet.look()
    assert fleet.choose().url == A
    fleet.released(B)
    assert fleet.choose().url == B
    for _ in range(20):
        fleet.released(A)
    assert fleet.servers[0].free == 8, "never more than it has"


async def test_a_wait_for_a_desktop_ends_as_soon_as_one_is_free() -> None:
    servers = Servers(a=0)
    fleet = EnvFleet([A, B], servers)
    await fleet.look()
    started = time.monotonic()
    await fleet.until_free(0.3)
    assert 0.3 <= time.monotonic() - started < 5.0
    waiting = asyncio.ensure_future(fleet.until_free(60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    servers.free[B] = 2  # it joins
    await fleet.look()
    await asyncio.wait_for(waiting, 10)
    assert fleet.choose().url == B


async def test_a_run_starts_with_the_servers_that_answer(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(b=1)
    fleet = EnvFleet([A, B], servers)
    await fleet.open()
    assert "no env server answers at http://a:1; new episodes go to the other env servers" in caplog.text
    assert chosen(fleet, 3) == {B: 3}
    servers.free[A] = 8
    await fleet.look()
    assert "the env server at http://a:1 answers again" in caplog.text
    assert chosen(fleet, 3) == {A: 3}
    await fleet.close()


async def test_a_run_without_any_server_that_answers_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(EnvServerError, match=r"at http://a:1; no env server answers at http://b:1"):
        await EnvFleet([A, B], Servers()).open()


async def test_neither_a_draining_nor_a_lost_server_gets_an_episode_while_another_one_answers() -> None:
    servers = Servers(a=8, b=8, c=1)
    servers.draining.add(B)
    fleet = EnvFleet([A, B, C], servers)
    await fleet.look()
    fleet.is_unreachable(fleet.servers[0], EnvServerError("the connection broke"))
    assert chosen(fleet, 5) == {C: 5}
    del servers.free[C], servers.free[B]
    await fleet.look()
    servers.draining.clear()
    assert chosen(fleet, 2) == {A: 2}, "it answers again"


async def test_a_server_that_is_down_is_reconnected_soon() -> None:
    limits: list[float | None] = []

    class Limited(Servers):
        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            limits.append(connect_s)
            return await super().health_of(base_url, connect_s=connect_s)

    servers = Limited()
    fleet = EnvFleet([A], servers)
    await fleet.look()
    await fleet.look()
    servers.free[A] = 1
    await fleet.look()
    await fleet.look()
    assert limits == [None, env_fleet.RETURN_CONNECT_S, env_fleet.RETURN_CONNECT_S, None]


async def test_desktops_that_are_released_while_a_returned_server_reports_count_as_free() -> None:
    class Full(Servers):
        async def report_of(self, base_url: str) -> ServerReport | None:
            for _ in range(3):
                fleet.released(base_url)
            return await super().report_of(base_url)

    fleet = EnvFleet([A], Full(a=0))
    await fleet.look()
    assert fleet.servers[0].free == 3


async def test_when_all_are_down_each_is_tried_again() -> None:
    fleet = EnvFleet([A, B], Servers())
    await fleet.look()
    assert chosen(fleet, 4) == {A: 2, B: 2}


async def test_servers_that_differ_are_refused_at_the_start() -> None:
    servers = Servers(a=1, b=1)
    servers.grounds[B] = OTHER
    with pytest.raises(EnvServerError, match=r"http://b:1 has other desktops .*other/grader 1.*ours/grader 1.*may_mix"):
        await EnvFleet([A, B], servers).open()
    mixed = EnvFleet([A, B], servers, may_mix=True)
    await mixed.open()
    assert chosen(mixed, 2) == {A: 1, B: 1}
    await mixed.close()


@pytest.mark.parametrize("may_mix", [False, True])
async def test_a_server_of_another_protocol_is_refused_even_where_servers_may_differ(may_mix: bool) -> None:
    servers = Servers(a=1, b=1)
    servers.protocols[A] = PROTOCOL + 1
    fleet = EnvFleet([A, B], servers, may_mix=may_mix)
    with pytest.raises(EnvServerError, match=rf"http://a:1 \(version 9.9.9\) has protocol {PROTOCOL + 1}.*install"):
        await fleet.open()
    assert fleet.grounds() == {OURS}, "the refused server does not set the run's image and grader"


async def test_a_server_that_joins_with_another_protocol_gets_no_episode_until_it_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = Servers(a=1)
    servers.protocols[B] = PROTOCOL + 1
    fleet = EnvFleet([A, B], servers, may_mix=True)
    await fleet.open()
    servers.free[B] = 8
    for _ in range(2):
        await fleet.look()
    assert chosen(fleet, 3) == {A: 3}
    assert caplog.text.count("install the same version on both sides; it gets no episode") == 1
    servers.protocols[B] = PROTOCOL
    await fleet.look()
    assert chosen(fleet, 3) == {B: 3}
    await fleet.close()


async def test_a_server_that_comes_back_with_another_image_gets_no_episode(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(a=1, b=8)
    fleet = EnvFleet([A, B], servers)
    await fleet.look()
    free = servers.free.pop(B)
    await fleet.look()
    servers.free[B], servers.grounds[B] = free, OTHER
    await fleet.look()
    await fleet.look()
    assert chosen(fleet, 3) == {A: 3}
    assert caplog.text.count("it gets no episode") == 1
    servers.free.pop(A)
    servers.grounds[A] = OTHER
    await fleet.look()
    assert chosen(fleet, 1) == {A: 1}, "A may come back as it was; B did not"
    servers.free[A] = 1
    await fleet.look()
    with pytest.raises(EnvServerError, match=r"http://a:1 has other desktops.*http://b:1 has other desktops"):
        fleet.choose()


async def test_a_refused_server_that_is_repaired_is_used() -> None:
    servers = Servers(a=1, b=8)
    fleet = EnvFleet([A, B], servers)
    await fleet.look()
    servers.free.pop(B)
    await fleet.look()
    servers.free[B], servers.grounds[B] = 8, OTHER
    await fleet.look()
    servers.grounds[B] = OURS
    await fleet.look()
    assert chosen(fleet, 3) == {B: 3}


async def test_servers_of_a_host_name_join_and_leave_with_its_addresses(caplog: pytest.LogCaptureFixture) -> None:
    addresses: list[Sequence[str] | OSError] = [["10.0.0.1"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("desktops.local", 8100)
        if isinstance(addresses[0], OSError):
            raise addresses[0]
        return addresses[0]

    servers = Servers()
    first, second = "http://10.0.0.1:8100", "http://[fd00::2]:8100"
    servers.free = {first: 2, second: 8}
    fleet = EnvFleet(["dns+http://desktops.local:8100"], servers, resolve=resolve)
    await fleet.open()
    assert chosen(fleet, 1) == {first: 1}
    addresses[0] = ["10.0.0.1", "fd00::2"]
    await fleet.look()
    assert chosen(fleet, 3) == {second: 3}
    addresses[0] = OSError("no answer")
    await fleet.look()
    assert chosen(fleet, 3) == {second: 3}, "what was known stays"
    assert "dns+http://desktops.local:8100 does not resolve: no answer" in caplog.text
    addresses[0] = ["10.0.0.1"]
    await fleet.look()
    assert chosen(fleet, 3) == {first: 3}
    addresses[0] = []
    await fleet.look()
    assert not fleet.has_free
    with pytest.raises(UnreachableError, match=r"found no env server at dns\+http://desktops\.local:8100"):
        fleet.choose()
    await fleet.close()


async def test_a_server_that_does_not_answer_does_not_delay_the_check_of_one_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)
    addresses = ["10.0.0.1"]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    class Frozen(Servers):
        num_asked = 0

        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            if base_url == A and self.free[base_url] < 0:
                self.num_asked += 1
                await asyncio.Event().wait()
            return await super().health_of(base_url, connect_s=connect_s)

    servers, new = Frozen(a=1), "http://10.0.0.2:8100"
    servers.free |= {"http://10.0.0.1:8100": 1, new: 8}
    fleet = EnvFleet([A, "dns+http://desktops.local:8100"], servers, resolve=resolve)
    await fleet.open()
    servers.free[A] = -1
    await until(lambda: servers.num_asked)
    addresses.append("10.0.0.2")
    await until(lambda: chosen(fleet, 1) == {new: 1})
    servers.free[new] = 0
    await until(lambda: [one.free for one in fleet.servers if one.url == new] == [0])
    assert servers.num_asked == 1, "one look at a server at a time"
    await fleet.close()


async def test_an_error_in_a_background_check_is_raised_where_a_server_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)

    class Broken(Servers):
        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            if self.free[base_url] < 0:
                raise AttributeError("no_such_method")
            return await super().health_of(base_url, connect_s=connect_s)

    servers = Broken(a=1)
    fleet = EnvFleet([A], servers)
    await fleet.open()
    servers.free[A] = -1
    with pytest.raises(AttributeError, match="no_such_method"):
        await until(lambda: not fleet.choose())
    await fleet.close()


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - what the fleet does by itself
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("address", "is_over"), [("dns+http://desktops.local:8100", False), ("ray+http://f", True)])
async def test_calls_to_a_server_that_ended_are_given_up_and_calls_to_a_draining_server_are_not(
    monkeypatch: pytest.MonkeyPatch, address: str, is_over: bool
) -> None:
    found = [A, B]

    async def look_up() -> Sequence[str]:
        return list(found)

    monkeypatch.setattr(env_fleet, "lookup_of", lambda address, resolve: look_up)
    fleet = EnvFleet([address], Servers(a=8, b=8))
    await fleet.open()
    await fleet.close()
    silence = fleet.silence_of(B)
    assert silence is not None
    assert not silence.is_set()
    found.remove(B)
    await fleet.look()
    assert fleet.silence_of(B) is silence
    assert silence.is_set() == is_over
    found.append(B)
    await fleet.look()
    assert not silence.is_set(), "it is back"


async def test_a_host_name_gets_some_time_to_resolve_to_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(env_fleet, "NAME_LIMIT_S", 0.5)
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["10.0.0.1"] if host == "late.local" and len(asked) > 3 else []

    servers = Servers()
    servers.free = {"http://10.0.0.1:8100": 2}
    fleet = EnvFleet(["dns+http://late.local:8100"], servers, resolve=resolve)
    await fleet.open()
    assert fleet.choose().url == "http://10.0.0.1:8100"
    await fleet.close()
    with pytest.raises(EnvServerError, match=r"found no env server at dns\+http://never\.local:8100"):
        await EnvFleet(["dns+http://never.local:8100"], servers, resolve=resolve).open()


async def test_a_single_server_that_comes_back_with_another_image_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)
    servers = Servers(a=1)
    fleet = EnvFleet([A], servers, may_mix=True)
    await fleet.open()
    assert fleet.grounds() == {OURS}
    fleet.is_unreachable(fleet.servers[0], EnvServerError("its connection broke"))
    servers.grounds[A] = OTHER
    async with asyncio.timeout(5):
        while fleet.grounds() != {OTHER}:  # noqa: ASYNC110 - the state of another task
            await asyncio.sleep(0.01)
    await fleet.close()


@pytest.mark.parametrize("address", ["dns+https://name:1", "dns+http://name", "dns+http://:1", "dns+http://a:b"])
def test_a_host_name_needs_a_port_and_has_no_tls(address: str) -> None:
    with pytest.raises(EnvServerError, match=r"must be dns\+http://NAME:PORT"):
        EnvFleet([address], Servers())


async def test_servers_are_checked_repeatedly_until_the_fleet_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.01)
    servers = Servers(a=8)
    fleet = EnvFleet([A, B], servers)
    await fleet.open()
    servers.free = {B: 8}
    async with asyncio.timeout(5):
        while fleet.choose().url != B:  # noqa: ASYNC110 - the state of another task
            await asyncio.sleep(0.01)
    await fleet.close()
    servers.free = {A: 8}
    await asyncio.sleep(0.05)
    assert fleet.choose().url == B


async def test_a_server_that_does_not_answer_in_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Servers):
        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            if base_url == A:
                await asyncio.sleep(60)
            return await super().health_of(base_url, connect_s=connect_s)

    monkeypatch.setattr(env_fleet, "LOOK_LIMIT_S", 0.05)
    fleet = EnvFleet([A, B], Stuck(a=8, b=1))
    await fleet.look()
    assert fleet.servers[0].complaint == "http://a:1/health did not answer within 0.05 s"
    assert chosen(fleet, 3) == {B: 3}


async def test_an_error_that_ends_the_background_checks_is_raised_for_the_next_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Defective(Servers):
        async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
            looked.set()
            raise KeyError("a defect")

    looked = asyncio.Event()
    monkeypatch.setattr(env_fleet, "LOOK_INTERVAL_S", 0.001)
    fleet = EnvFleet([A, B], Defective())
    fleet.watch()
    assert fleet.choose().url == A
    await asyncio.wait_for(looked.wait(), 5)
    await asyncio.sleep(0.05)
    with pytest.raises(KeyError, match="a defect"):
        fleet.choose()
    await fleet.close()
