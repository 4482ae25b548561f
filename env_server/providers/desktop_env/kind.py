"""The settings of the provider `desktop_env`, which OSWorld's graders use too."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from env_server.providers.kinds import ProviderKind
from env_server.table import Option, Table

if TYPE_CHECKING:
    from env_server.driving.driver import Drivers
    from env_server.protocols import Provider
    from env_server.settings import Settings


class DesktopEnvSettings(Table):
    """OSWorld's own DesktopEnv, in the environment where it is installed."""

    python: Annotated[Path, Option("--desktop-env-python")] = Path("var/desktop-env/bin/python")
    """The interpreter of that environment. Graders of the kind `osworld` also run in it."""
    provider_name: Annotated[str, Option("--desktop-env-provider")] = "docker"
    """DesktopEnv's own provider: docker, vmware, virtualbox, aws, azure, aliyun or volcengine; or `local`: the local
    desktops of this project."""
    path_to_vm: Annotated[str | None, Option("--desktop-env-vm"), Field(examples=["Ubuntu.vmx"])] = None
    """DesktopEnv's path_to_vm. Without it DesktopEnv may download an image of tens of GB."""
    region: Annotated[str | None, Field(examples=["us-east-1"])] = None
    """Region of a cloud provider."""
    snapshot_name: str = "init_state"
    """The snapshot that a reset restores."""
    os_type: str = "Ubuntu"
    """Ubuntu or Windows."""
    client_password: str = "password"  # noqa: S105 - of the published images
    """Password of the user in the image."""
    headless: bool = True
    """No window of the virtual machine on this machine's screen."""
    plugin: Annotated[
        str | None, Option("--desktop-env-plugin", "MODULE:FUNCTION"), Field(examples=["module:function"])
    ] = None
    """Your own provider for DesktopEnv."""


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
    make=make,
    make_drivers=make_drivers,
    title="provider desktop_env, grader osworld",
)
