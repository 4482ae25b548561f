"""Desktops that are somewhere else: sandboxes behind a gateway, asked for and spoken to through a client of one's own
or through the reference client for plain HTTPS."""

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
