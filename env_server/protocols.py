"""The interface between the pool and a kind of desktop: start, use, reset and remove one."""

from typing import Protocol

from env_server.guest_client import GuestClient


class ProvidedDesktop(Protocol):
    """One running desktop. Every failure is a ReplicaError (it died) or a DependencyError (it can never start here)."""

    @property
    def guest(self) -> GuestClient:
        """The client of this desktop's guest agent. `reset` may replace it: read it before each use, never keep it."""
        ...

    async def reset(self) -> None:
        """A fresh home and fresh processes; returns when the guest agent has answered with a screenshot."""
        ...

    def is_alive(self) -> bool: ...

    async def stop(self) -> None:
        """Idempotent and safe under cancellation; leaves no process, mount or folder. Slow parts may be finished by the
        provider in the background."""
        ...


class Provider(Protocol):
    """Makes desktops of one kind and one image."""

    @property
    def name(self) -> str: ...

    @property
    def image_digest(self) -> str:
        """Digest of everything a desktop consists of: equal digests mean equal desktops."""
        ...

    @property
    def details(self) -> str:
        """Free text: accelerator and limits of its desktops; may be known only after the first desktop."""
        ...

    async def start(self, replica_id: str) -> ProvidedDesktop:
        """A desktop that has answered its first screenshot. The first call may build the image."""
        ...

    async def close(self) -> None:
        """Stops every desktop it started; idempotent.

        Raises:
            ReplicaError: names what could not be removed.
        """
        ...
