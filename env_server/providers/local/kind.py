"""The settings of the provider `local`."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from env_server.providers.kinds import OptionGroup, ProviderKind

if TYPE_CHECKING:
    from env_server.providers.base import Provider
    from env_server.settings import Settings


class LocalSettings(BaseModel):
    """Limits and options of one `local` desktop on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(default=1024, ge=256)
    max_processes: int = Field(default=512, ge=64)
    max_cpus: float | None = Field(default=None, ge=0.1)
    """Most CPU time per second; None shares it equally between desktops, and gives a desktop what others do not use."""
    allow_unsandboxed: bool = False
    """If namespaces are unavailable, run desktops as plain processes of this user; a model can then reach the user's
    files."""
    wine: bool = False
    """Windows programs on every desktop (Debian's Wine), for tasks on a drive C:."""


def add_options(group: OptionGroup) -> None:
    group.flag("allow_unsandboxed", "without namespaces, run desktops as plain processes of this user")
    group.flag("wine", "desktops have Windows programs (needs the Debian packages wine and wine64)")
    group.option("memory_mb", "--desktop-memory-mb", type=int, help="most memory of a desktop (default 1024)")
    group.option("max_processes", "--desktop-processes", type=int, help="most processes of one (default 512)")
    group.option("max_cpus", "--desktop-cpus", type=float, help="most CPUs of one (default: equal shares)")


def make(settings: "Settings") -> "Provider":
    from env_server.providers.local.provider import LocalProvider

    own = dict(settings.of(LocalSettings))
    return LocalProvider(images=settings.state_dir, screen_size=settings.screen, **own)


KIND = ProviderKind(name="local", settings=LocalSettings, add_options=add_options, make=make)
