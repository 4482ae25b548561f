"""The settings of the provider `gateway`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from env_server.providers.kinds import OptionGroup, ProviderKind

if TYPE_CHECKING:
    from env_server.providers.base import Provider
    from env_server.settings import Settings

TOKEN_VARIABLE = "OSWORLD_SANDBOX_TOKEN"  # noqa: S105 - the variable's name, not a token


class GatewaySettings(BaseModel):
    """Remote sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = None
    client: str = "https"
    """A sandbox client's entry point, or module:attribute."""
    quota_wait_s: float = Field(default=300.0, ge=0, le=3600)
    """How long one replica waits for quota before its start counts as failed."""
    start_timeout_s: float = Field(default=180.0, gt=0, le=540)
    """Of one start at the gateway, and then of its guest until it shows a screen."""
    ca_file: Path | None = None
    """Certificates (PEM) to trust instead of the system's."""
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the client; no secrets."""
    token: SecretStr | None = None
    """The token for the gateway; only from the environment."""


def add_options(group: OptionGroup) -> None:
    group.option("url", "--gateway-url", help="https://HOST[:PORT][/PATH] of the gateway")
    group.option("client", "--gateway-client", help="a sandbox client's name, or module:attribute (https)")
    group.option("quota_wait_s", "--gateway-quota-wait-s", type=float, help="longest wait (default 300)")
    group.option("ca_file", "--gateway-ca-file", type=Path, help="certificates to trust, PEM")


def make(settings: "Settings") -> "Provider":
    from env_server.providers.gateway.provider import GatewayProvider

    own = settings.of(GatewaySettings)
    token = own.token.get_secret_value() if own.token else ""
    return GatewayProvider(own, token=token, screen_size=settings.screen)


def gateway_token(environment: Mapping[str, str] | None = None) -> SecretStr | None:
    """The token that a gateway's clients send and the reference gateway requires; None if none is set."""
    token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "").strip()
    return SecretStr(token) if token else None


KIND = ProviderKind(
    name="gateway",
    settings=GatewaySettings,
    add_options=add_options,
    make=make,
    variables={"token": TOKEN_VARIABLE},
    about=f"its token comes from {TOKEN_VARIABLE}",
    has_ports=True,
)
