"""The provider `gateway`: sandboxes start and end with episodes, a wait for quota holds nothing, and a call that may
have happened is not repeated."""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fake_desktops import until
from gateway_doubles import SCREEN, URL, ScriptedClient, gateway, hurried, picture

from env_server.guest_client import GuestCall
from env_server.providers.gateway.client import (
    SandboxBusyError,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
)
from env_server.providers.gateway.provider import GatewayProvider
from env_server.providers.gateway.settings import GatewaySettings
from env_server.providers.gateway.transport import is_repeatable
from env_server.replicas.pool import Pool
from osworld_pipeline.errors import DependencyError, NoCapacityError, ReplicaError

CLICK = (GuestCall(name="click", args=(1, 2)),)
BROKEN = SandboxFailedError("the connection broke")


def provider_of(client: ScriptedClient, **settings: object) -> GatewayProvider:
    made = GatewaySettings.model_validate({"url": URL, **settings})
    return GatewayProvider(made, screen_size=SCREEN, client=client, retry_policy=hurried())


def is_there(path: Path) -> bool:
    return path.exists()


async def test_a_desktop_is_a_sandbox_and_a_reset_is_another_one() -> None:
    async with gateway(quota=1) as there:
        provider = there.provider()
        desktop = await provider.start("r0")
        assert await desktop.guest.screenshot() == picture()
        assert provider.image_digest == "f" * 64
        await desktop.guest.act(CLICK)
        assert len(there.last.acts) == 1
        await desktop.reset()
        assert [each.is_stopped for each in there.desktops.desktops] == [True, False]
        assert there.last.acts == []
        await desktop.stop()
        await desktop.stop()
        assert there.num_running == 0
        with pytest.raises(ReplicaError, match="is stopped"):
            _ = desktop.guest
        await provider.close()


async def test_a_replica_waits_for_quota_and_has_its_sandbox_when_one_is_given_back() -> None:
    async with gateway(quota=1) as there:
        provider = there.provider()
        first = await provider.start("r0")
        second = asyncio.create_task(provider.start("r1"))
        await until(lambda: there.table.num_refused > 0)
        assert not second.done()
        assert there.num_running == 1
        await first.stop()
        assert (await second).is_alive()
        await provider.close()
        assert there.num_running == 0


async def test_a_wait_for_quota_ends_with_its_budget_and_says_what_to_do() -> None:
    async with gateway(quota=1) as there:
        provider = there.provider(quota_wait_s=20)
        await provider.start("r0")
        with pytest.raises(ReplicaError, match=r"no sandbox for r1 within 20 s .*fewer --replicas"):
            await provider.start("r1")
        assert provider.gate.num_waiting == 0
        await provider.close()


async def test_episodes_that_queue_while_a_replica_waits_for_quota_hold_no_replica() -> None:
    """A client gets 503 at its own time limit, long before the replica's wait is over; nothing is lent until then."""
    async with gateway(quota=1) as there:
        taken = (await there.http.post("/v1/sandboxes")).json()
        provider = there.provider(quota_wait_s=3000)
        pool = Pool(provider, num_replicas=1, queue_timeout_s=0.1)
        starting = asyncio.create_task(pool.start())
        await until(lambda: there.table.num_refused > 0)
        with pytest.raises(NoCapacityError):
            async with pool.lease_replica("client"):
                raise AssertionError("there is none to lend")
        path, headers = f"/v1/sandboxes/{taken['sandbox_id']}", {"X-Sandbox-Session": taken["session_id"]}
        await there.http.delete(path, headers=headers)
        await starting
        async with pool.lease_replica("client") as lease:
            assert lease.desktop.is_alive()
        await pool.close()
        assert there.num_running == 0


async def test_a_reset_gives_its_sandbox_back_before_it_waits_for_another() -> None:
    client = ScriptedClient()
    provider = provider_of(client, quota_wait_s=5)
    desktop = await provider.start("r0")
    client.errors = [None, *[SandboxBusyError("full")] * 50]
    with pytest.raises(ReplicaError, match="no sandbox"):
        await desktop.reset()
    assert client.calls.index("stop") < client.calls.index("start", 1)
    assert not desktop.is_alive()
    await provider.close()


async def test_a_cancelled_wait_for_quota_leaves_nothing() -> None:
    async with gateway(quota=1) as there:
        provider = there.provider()
        await provider.start("r0")
        second = asyncio.create_task(provider.start("r1"))
        await until(lambda: there.table.num_refused > 0)
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert provider.gate.num_waiting == 0
        await provider.close()
        assert there.num_running == 0


async def test_a_start_that_is_cancelled_while_it_runs_gives_its_sandbox_back() -> None:
    client = ScriptedClient()
    client.on_start = asyncio.Event()
    provider = provider_of(client)
    starting = asyncio.create_task(provider.start("r0"))
    await until(lambda: client.calls == ["start"])
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    client.on_start.set()
    await until(lambda: client.stopped == ["sb-1"])
    await provider.close()
    assert client.calls[-1] == "close"


async def test_a_lost_start_is_sent_again_under_the_same_name_and_only_if_answers_are_kept() -> None:
    keeping = ScriptedClient(BROKEN, keeps_answers=True)
    provider = provider_of(keeping)
    await provider.start("r0")
    assert keeping.calls[:2] == ["start", "start"]
    assert keeping.request_ids[0] == keeping.request_ids[1] != ""
    await provider.close()
    forgetting = ScriptedClient(BROKEN)
    with pytest.raises(SandboxFailedError):
        await provider_of(forgetting).start("r0")
    assert forgetting.calls == ["start"]


@pytest.mark.parametrize(
    "error", [SandboxRefusedError("wrong token"), SandboxFailedError("x", may_have_happened=False)]
)
async def test_a_gateway_that_cannot_give_a_sandbox_is_reported(error: Exception) -> None:
    client = ScriptedClient(*[error] * 20)
    with pytest.raises(type(error)):
        await provider_of(client).start("r0")
    assert len(client.calls) == (1 if isinstance(error, DependencyError) else 4)


async def test_a_click_that_may_have_happened_is_not_sent_again() -> None:
    client = ScriptedClient()
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.calls.clear()
    client.errors = [BROKEN]
    with pytest.raises(ReplicaError, match="may have been executed, so it is not sent again"):
        await desktop.guest.act(CLICK)
    assert client.calls.count("/act") == 1
    await provider.close()


@pytest.mark.parametrize(
    "errors",
    [
        [SandboxBusyError("busy", retry_after_s=1)] * 6,
        [SandboxFailedError("no", may_have_happened=False)] * 3,
        [
            *[SandboxBusyError("busy", retry_after_s=1)] * 6,
            *[SandboxFailedError("no", may_have_happened=False)] * 3,
        ],
    ],
    ids=["busy", "failed", "busy, then failed"],
)
async def test_a_click_that_certainly_did_not_happen_is_sent_again(errors: list[Exception]) -> None:
    client = ScriptedClient()
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.errors = [*errors]
    await desktop.guest.act(CLICK)
    assert client.calls.count("/act") == len(errors) + 1
    await provider.close()


async def test_a_read_is_sent_again_and_fails_after_its_last_attempt() -> None:
    client = ScriptedClient()
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.calls.clear()
    client.errors = [BROKEN, BROKEN]
    assert await desktop.guest.screenshot() == picture()
    client.errors = [BROKEN] * 20
    with pytest.raises(ReplicaError):
        await desktop.guest.platform()
    assert client.calls.count("/platform") == 4
    client.errors = []
    await provider.close()


async def test_a_busy_gateway_is_not_asked_for_longer_than_the_time_limit_of_the_call() -> None:
    client = ScriptedClient()
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.errors = [SandboxBusyError("busy", retry_after_s=9)] * 100
    client.calls.clear()
    with pytest.raises(ReplicaError, match="busy"):
        await desktop.guest.screenshot(timeout_s=30)
    assert client.calls.count("/screenshot") <= 4
    client.errors = []
    await provider.close()


@pytest.mark.parametrize(
    "path", ["/act", "/execute", "/setup/execute", "/setup/launch", "/run_python", "/end_recording"]
)
def test_a_call_that_acts_on_the_desktop_is_not_repeatable(path: str) -> None:
    assert not is_repeatable("POST", path)


async def test_each_click_happens_once_through_a_gateway_that_loses_answers() -> None:
    async with gateway(quota=1, faults="fail=0.15,lose=0.15,busy=0.1") as there:
        provider = there.provider(quota_wait_s=2000)
        desktop = await provider.start("r0")
        for index in range(30):
            await desktop.guest.act([GuestCall(name="click", args=(index, 0))])
        assert [act[0]["args"][0] for act in there.last.acts] == list(range(30))
        made = there.faults.num_made
        assert min(made["fail"], made["lose"], made["busy"]) > 0
        await provider.close()
    assert there.num_running == 0


async def test_a_dead_sandbox_is_detected_by_a_call_and_by_its_refresh() -> None:
    async with gateway() as there:
        provider = there.provider()
        called, refreshed = await provider.start("r0"), await provider.start("r1")
        for fake in there.desktops.desktops:
            fake.alive = False
        with pytest.raises(SandboxGoneError):
            await called.guest.platform()
        assert not called.is_alive()
        await until(lambda: not refreshed.is_alive())
        await provider.close()


async def test_a_sandbox_survives_a_short_outage_of_its_gateway_but_not_a_long_one() -> None:
    client = ScriptedClient()
    client.lifetime_s = 60.0
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.errors = [BROKEN, BROKEN]
    await until(lambda: client.calls.count("refresh") >= 4)
    assert desktop.is_alive()
    client.errors = [BROKEN] * 1000
    await until(lambda: not desktop.is_alive())
    client.errors = []
    await provider.close()


async def test_a_sandbox_in_use_outlives_its_lifetime() -> None:
    async with gateway(lifetime_s=0.2) as there:
        provider = GatewayProvider(GatewaySettings(url=URL), screen_size=SCREEN, client=there.client())
        desktop = await provider.start("r0")
        await asyncio.sleep(0.8)
        assert desktop.is_alive()
        assert await desktop.guest.platform() == "Linux"
        await provider.close()


async def test_a_guest_that_is_still_booting_is_waited_for() -> None:
    client = ScriptedClient(None, *[SandboxFailedError("booting", may_have_happened=False)] * 9)
    provider = provider_of(client)
    assert (await provider.start("r0")).is_alive()
    await provider.close()


async def test_screens_of_another_size_are_refused_with_the_option_to_take() -> None:
    client = ScriptedClient()
    client.size = (80, 60)
    with pytest.raises(DependencyError, match="start with --screen-size 80x60"):
        await provider_of(client).start("r0")
    assert client.stopped == ["sb-1"]


async def test_a_guest_is_lent_to_programs_of_this_user_and_answers_them_as_it_answers_us() -> None:
    async with gateway() as there:
        provider = there.provider()
        desktop = await provider.start("r0")
        there.last.files["/a"] = b"\x00bytes\xff"
        path = Path(urlsplit(desktop.guest.address).path)
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://guest") as stranger:
            assert (await stranger.get("/platform")).text == "Linux"
            assert (await stranger.post("/file", data={"file_path": "/a"})).content == b"\x00bytes\xff"
            assert (await stranger.post("/file", data={"file_path": "/none"})).status_code == 404
            await desktop.reset()
            with pytest.raises(httpx.HTTPError):
                await stranger.get("/platform")
        assert not is_there(path)
        await provider.close()


async def test_a_stop_that_fails_at_the_gateway_is_tried_again_and_then_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient()
    provider = provider_of(client)
    desktop = await provider.start("r0")
    client.errors = [BROKEN]
    await desktop.stop()
    assert client.stopped == ["sb-1"]
    desktop = await provider.start("r1")
    client.errors = [BROKEN] * 20
    await desktop.stop()
    assert "was not stopped, and uses quota until its life ends" in caplog.text
    await provider.close()
