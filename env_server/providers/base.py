"""What the pool needs of a kind of desktop: start one, talk to it, make it fresh again, take it away."""

from typing import Protocol

from env_server.guest_client import GuestClient


class ProvidedDesktop(Protocol):
    """One running desktop. Every failure is a ReplicaError (it died) or a DependencyError (it can never start here)."""

    @property
    def guest(self) -> GuestClient:
        """The client of this desktop's guest agent. `reset` may replace it: ask each time, never keep it."""
        ...

    async def reset(self) -> None:
        """A fresh home and fresh processes; returns when the guest agent has answered a screenshot."""
        ...

    def is_alive(self) -> bool: ...

    async def stop(self) -> None:
        """Idempotent and safe under cancellation; leaves no process, mount or folder. What takes long to end may be
        left to the provider, which ends it in the background."""
        ...


class Provider(Protocol):
    """Makes desktops of one kind and one image."""

    @property
    def name(self) -> str: ...

    @property
    def image_digest(self) -> str:
        """Digest of everything a desktop is made of: equal digests mean equal desktops."""
        ...

    @property
    def details(self) -> str:
        """For people, what its desktops run under and within; may become known with the first desktop only."""
        ...

    async def start(self, replica_id: str) -> ProvidedDesktop:
        """A desktop that has answered its first screenshot. The first call may build the image."""
        ...

    async def close(self) -> None:
        """Stops every desktop it started; idempotent.

        Raises:
            ReplicaError: it names what could not be removed.
        """
        ...
