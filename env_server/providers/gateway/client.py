"""The seam between this provider and a vendor's gateway: five calls, which the reference client makes over plain HTTPS
and a vendor's own client as it likes. Clients are found by entry point; they neither wait nor try again themselves."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from osworld_pipeline.errors import DependencyError, PipelineError, ReplicaError

ENTRY_POINTS = "osworld_pipeline.sandbox_clients"
"""The group in which a distribution names its clients: a callable that takes ClientOptions."""


class SandboxBusyError(ReplicaError):
    """The quota is used up, or the gateway is too busy. Nothing has happened, so any call may be sent again later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the gateway asked for; None where it said nothing."""


class SandboxFailedError(ReplicaError):
    """The gateway failed (5xx), or the connection to it broke."""

    def __init__(self, message: str, *, may_have_happened: bool = True) -> None:
        super().__init__(message)
        self.may_have_happened = may_have_happened
        """False only where it is known that the call never reached the sandbox."""


class SandboxGoneError(ReplicaError):
    """There is no such sandbox any more, or its session is over."""


class SandboxRefusedError(DependencyError):
    """It will never be otherwise: a wrong token, a wrong address, or a request that the gateway does not know."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One desktop at the gateway, as of its last start or refresh."""

    sandbox_id: str
    session_id: str
    lifetime_s: float | None = None
    """It ends when it has not been refreshed for so long; None where the gateway does not say."""
    image_digest: str = ""
    """Equal digests mean equal desktops; empty where the gateway does not say."""
    details: str = ""
    """For people, what it runs under."""


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
    """Names a call that must not happen twice; empty where that does no harm."""


@dataclass(frozen=True, kw_only=True)
class SandboxAnswer:
    """What the guest itself answered, whatever its status."""

    status: int
    content_type: str
    body: bytes


class SandboxClient(Protocol):
    """Every call ends within `limit_s` and raises one of the four errors above, as soon as it knows."""

    @property
    def keeps_answers(self) -> bool:
        """The gateway remembers answers by `request_id`, so that a call whose answer was lost may be sent again and
        happens once all the same."""
        ...

    async def start(self, request_id: str, *, limit_s: float) -> Sandbox:
        """A sandbox of the caller's own; its guest may still be booting."""
        ...

    async def stop(self, sandbox: Sandbox, *, limit_s: float) -> None:
        """One that is gone already counts as stopped."""
        ...

    async def refresh(self, sandbox: Sandbox, *, limit_s: float) -> Sandbox:
        """Proves that it lives and prolongs its life; its session may have another id from then on."""
        ...

    async def request(self, sandbox: Sandbox, request: SandboxRequest, *, limit_s: float) -> SandboxAnswer: ...

    async def close(self) -> None:
        """Of the client, not of its sandboxes."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """What a client is made of."""

    url: str
    token: str = field(repr=False)
    """Empty without one. Never logged, never in a message, never an argument of a program."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """A vendor's own, from the configuration's [gateway.options]; no secrets."""


MakeClient = Callable[[ClientOptions], SandboxClient]


def load_client(name: str, options: ClientOptions) -> SandboxClient:
    """`name` is an entry point's, or module:attribute.

    Raises:
        DependencyError: there is no such client, or it cannot be made; names the clients there are.
        ValueError: the client will not have these options.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    try:
        if name == "https":  # whether or not this checkout is installed
            from env_server.providers.gateway.https_client import HttpsSandboxClient

            make: MakeClient = HttpsSandboxClient
        elif name in found:
            make = found[name].load()
        elif ":" in name:
            module, _, attribute = name.partition(":")
            make = getattr(importlib.import_module(module), attribute)
        else:
            known = ", ".join(sorted({"https", *found}))
            raise DependencyError(
                f"no sandbox client is named {name!r}; there are: {known}. Install the distribution that has it (an "
                f"entry point of the group {ENTRY_POINTS}), or give module:attribute"
            )
        return make(options)
    except PipelineError:
        raise
    except (ImportError, AttributeError, TypeError) as error:
        raise DependencyError(
            f"the sandbox client {name!r} cannot be made ({error}); check --gateway-client"
        ) from error
