"""The settings of the provider `gateway`, and the token for a gateway."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from env_server.table import Option, Table

TOKEN_VARIABLE = "OSWORLD_SANDBOX_TOKEN"  # noqa: S105 - the variable's name, not a token


class GatewaySettings(Table):
    """Remote sandboxes; the token comes from OSWORLD_SANDBOX_TOKEN."""

    url: Annotated[str | None, Option("--gateway-url"), Field(examples=["https://sandboxes.example.org"])] = None
    """The gateway's address: https://HOST[:PORT][/PATH]."""
    client: Annotated[str, Option("--gateway-client")] = "https"
    """`https` is the reference client; a vendor's is given by the name of its entry point, or as module:attribute."""
    quota_wait_s: Annotated[float, Option("--gateway-quota-wait-s"), Field(ge=0, le=3600)] = 300.0
    """How long one replica waits for quota before its start counts as failed."""
    start_timeout_s: Annotated[float, Field(gt=0, le=540)] = 180.0
    """Limit of one start at the gateway, and then of its guest until it shows a screen."""
    ca_file: Annotated[Path | None, Option("--gateway-ca-file"), Field(examples=["ca.pem"])] = None
    """Certificates (PEM) to trust instead of the system's."""
    options: dict[str, str] = Field(default_factory=dict)
    """Options of a vendor's client; no secrets."""
    token: SecretStr | None = None
    """The token for the gateway; only from the environment."""


def gateway_token(environment: Mapping[str, str] | None = None) -> SecretStr | None:
    """The token that a gateway's clients send and the reference gateway requires; None if none is set."""
    token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "").strip()
    return SecretStr(token) if token else None
