"""The settings of the provider `desktop_env`, which OSWorld's graders use too."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from env_server.providers.kinds import OptionGroup, ProviderKind

if TYPE_CHECKING:
    from env_server.episodes.driver import Drivers
    from env_server.providers.base import Provider
    from env_server.settings import Settings


class DesktopEnvSettings(BaseModel):
    """OSWorld's own DesktopEnv, in the environment where it is installed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path = Path("var/desktop-env/bin/python")
    """The interpreter of that environment; graders of the kind `osworld` also run in it."""
    provider_name: str = "docker"
    path_to_vm: str | None = None
    region: str | None = None
    snapshot_name: str = "init_state"
    os_type: str = "Ubuntu"
    client_password: str = "password"  # noqa: S105 - of the published images
    headless: bool = True
    plugin: str | None = None
    """module:function with your own provider for DesktopEnv."""


def add_options(group: OptionGroup) -> None:
    group.option("python", "--desktop-env-python", type=Path, help="interpreter where it is installed")
    group.option("provider_name", "--desktop-env-provider", help="DesktopEnv's provider (docker)")
    group.option("path_to_vm", "--desktop-env-vm", help="DesktopEnv's path_to_vm")
    group.option("plugin", "--desktop-env-plugin", metavar="MODULE:FUNCTION", help="your own provider")


def make(settings: "Settings") -> "Provider":
    from env_server.providers.desktop_env.provider import DesktopEnvProvider

    own = dict(settings.of(DesktopEnvSettings))
    return DesktopEnvProvider(screen_size=settings.screen, folder=settings.state_dir / "desktop-env", **own)


def make_drivers(settings: "Settings") -> "Drivers":
    from env_server.providers.desktop_env.driver import DesktopEnvDrivers

    return DesktopEnvDrivers(python=settings.of(DesktopEnvSettings).python, limits=settings.limits)


KIND = ProviderKind(
    name="desktop_env",
    settings=DesktopEnvSettings,
    add_options=add_options,
    make=make,
    make_drivers=make_drivers,
    title="provider desktop_env, grader osworld",
)
