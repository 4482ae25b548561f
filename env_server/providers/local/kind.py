"""The settings of the provider `local`."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from env_server.providers.kinds import ProviderKind
from env_server.table import Option, Table

if TYPE_CHECKING:
    from env_server.protocols import Provider
    from env_server.settings import Settings


class LocalSettings(Table):
    """Desktops on this machine, in namespaces."""

    memory_mb: Annotated[int, Option("--desktop-memory-mb"), Field(ge=256)] = 1024
    """Most memory of one desktop. If a desktop exceeds it, its own processes are killed, not the host's."""
    max_processes: Annotated[int, Option("--desktop-processes"), Field(ge=64)] = 512
    """Most processes of one desktop."""
    max_cpus: Annotated[float | None, Option("--desktop-cpus"), Field(ge=0.1, examples=[2.0])] = None
    """Most CPU time of one desktop per second. Without it desktops share the processors equally, and a desktop gets
    what others do not use."""
    allow_unsandboxed: Annotated[bool, Option()] = False
    """If namespaces are unavailable, run desktops as plain processes of this user; a model can then reach the user's
    files."""
    wine: Annotated[bool, Option()] = False
    """Windows programs on every desktop, for tasks on a drive C:; needs the Debian packages wine and wine64."""


def make(settings: "Settings") -> "Provider":
    from env_server.providers.local.provider import LocalProvider

    own = dict(settings.of(LocalSettings))
    return LocalProvider(images=settings.state_dir, screen_size=settings.screen, **own)


KIND = ProviderKind(name="local", settings=LocalSettings, make=make)
