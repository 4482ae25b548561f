"""A sandbox client gets the limits as they were set and returns bytes unchanged."""

from gateway_doubles import SCREEN, URL, ScriptedClient, hurried

from env_server.guest_client import GuestCall
from env_server.providers.gateway.provider import GatewayProvider
from env_server.providers.gateway.settings import GatewaySettings

BYTES = bytes(range(256)) * 3


def provider_of(client: ScriptedClient, **settings: float) -> GatewayProvider:
    made = GatewaySettings.model_validate({"url": URL, **settings})
    return GatewayProvider(made, screen_size=SCREEN, client=client, retry_policy=hurried())


async def test_the_client_gets_the_limits_that_were_set() -> None:
    client = ScriptedClient()
    provider = provider_of(client, start_timeout_s=77, quota_wait_s=11)
    desktop = await provider.start("r0")
    assert client.limits["start"] == [77.0]
    assert all(limit_s <= 77.0 for limit_s in client.limits["/screenshot"])
    await desktop.guest.act([GuestCall(name="click", args=(1, 2))], timeout_s=23)
    assert 22.0 < client.limits["/act"][0] <= 23.0
    await desktop.guest.execute(["sleep", "100"], timeout_s=100)
    assert 100.0 < client.limits["/execute"][0] < 150.0
    await desktop.guest.file("/a", timeout_s=90)
    # A repeatable call spends a third of its time on one answer.
    assert 29.0 < client.limits["/file"][0] <= 30.0
    # A pool gives a reset no less time than its parts may take.
    assert provider.reset_timeout_s >= 11 + 2 * 77
    await provider.close()


async def test_a_wallpaper_comes_through_a_gateway_unchanged() -> None:
    client = ScriptedClient()
    client.answers = {"/wallpaper": BYTES, "/file": BYTES}
    provider = provider_of(client)
    desktop = await provider.start("r0")
    assert await desktop.guest.wallpaper() == BYTES
    assert await desktop.guest.file("/home/user/a.png") == BYTES
    await provider.close()
