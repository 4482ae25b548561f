"""The interface between this provider and a vendor's gateway: four calls, which the reference client makes over plain
HTTPS, and `close`. Clients neither wait nor retry themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from osworld_pipeline.errors import DependencyError, ReplicaError


class SandboxBusyError(ReplicaError):
    """The quota is used up, or the gateway is too busy. The call was not executed, so it may be sent again later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The delay that the gateway requested; None if it named none."""


class SandboxFailedError(ReplicaError):
    """The gateway failed (5xx), or the connection to it was lost."""

    def __init__(self, message: str, *, may_have_happened: bool = True) -> None:
        super().__init__(message)
        self.may_have_happened = may_have_happened
        """False only if the call certainly did not reach the sandbox."""


class SandboxGoneError(ReplicaError):
    """The sandbox does not exist any more, or its session is over."""


class SandboxRefusedError(DependencyError):
    """A permanent error: a wrong token, a wrong address, or a request that the gateway does not support."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One desktop at the gateway, as of its last start or refresh."""

    sandbox_id: str
    session_id: str
    lifetime_s: float | None = None
    """The sandbox ends if it is not refreshed for this time; None if the gateway does not say."""
    image_digest: str = ""
    """Equal digests mean equal desktops; empty if the gateway does not say."""
    details: str = ""
    """Free text about its environment."""


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """One call of OSWorld's guest protocol."""

    method: str
    path: str
    """Such as /screenshot, without a query."""
    query: str = ""
    content_type: str = ""
    body: bytes = b""
    request_id: str = ""
    """Identifies a call that must not be executed twice; empty if repeating does no harm."""


@dataclass(frozen=True, kw_only=True)
class SandboxAnswer:
    """The guest's own answer, with any status."""

    status: int
    content_type: str
    body: bytes


class SandboxClient(Protocol):
    """Every call ends within `limit_s`. A call that fails raises one of the four errors above as early as possible."""

    @property
    def keeps_answers(self) -> bool:
        """Whether the gateway stores answers by `request_id`, so that a call whose answer was lost may be sent again
        and is executed only once."""
        ...

    async def start(self, request_id: str, *, limit_s: float) -> Sandbox:
        """Starts a separate sandbox for the caller; its guest may still be booting."""
        ...

    async def stop(self, sandbox: Sandbox, *, limit_s: float) -> None:
        """A sandbox that is already gone counts as stopped."""
        ...

    async def refresh(self, sandbox: Sandbox, *, limit_s: float) -> Sandbox:
        """Checks that it is alive and extends its lifetime; its session id may change."""
        ...

    async def request(self, sandbox: Sandbox, request: SandboxRequest, *, limit_s: float) -> SandboxAnswer: ...

    async def close(self) -> None:
        """Closes the client, not its sandboxes."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The arguments of a client."""

    url: str
    token: str = field(repr=False)
    """Empty without one. Never logged, never in a message, never an argument of a program."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """A vendor's own options, from the configuration's [gateway.options]; no secrets."""
