"""The provider `gateway`: remote sandboxes."""

from typing import TYPE_CHECKING

from env_server.providers.gateway.settings import TOKEN_VARIABLE, GatewaySettings
from env_server.providers.kinds import ProviderKind

if TYPE_CHECKING:
    from env_server.protocols import Provider
    from env_server.settings import Settings


def make(settings: "Settings") -> "Provider":
    from env_server.providers.gateway.provider import GatewayProvider

    own = settings.of(GatewaySettings)
    token = own.token.get_secret_value() if own.token else ""
    return GatewayProvider(own, token=token, screen_size=settings.screen)


KIND = ProviderKind(
    name="gateway",
    settings=GatewaySettings,
    make=make,
    variables={"token": TOKEN_VARIABLE},
    has_ports=True,
)
