"""Remote desktops: sandboxes behind a gateway, used through a client of your own or through the reference client for
plain HTTPS."""

from env_server.providers.gateway.client import (
    Sandbox,
    SandboxAnswer,
    SandboxBusyError,
    SandboxClient,
    SandboxFailedError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxRequest,
)
from env_server.providers.gateway.provider import GatewayProvider

__all__ = [
    "GatewayProvider",
    "Sandbox",
    "SandboxAnswer",
    "SandboxBusyError",
    "SandboxClient",
    "SandboxFailedError",
    "SandboxGoneError",
    "SandboxRefusedError",
    "SandboxRequest",
]
