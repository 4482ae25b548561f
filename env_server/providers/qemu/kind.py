"""The settings of the provider `qemu`."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from env_server.providers.kinds import OptionGroup, ProviderKind

if TYPE_CHECKING:
    from env_server.providers.base import Provider
    from env_server.settings import Settings

PASSWORD_VARIABLE = "WINDOWS_ADMIN_PASSWORD"  # noqa: S105 - the variable's name, not a password


class QemuSettings(BaseModel):
    """The virtual machine of one `qemu` desktop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Path | None = None
    """A qcow2 image with OSWorld's guest server; None means our own, built by `env-server build-image`."""
    os_type: Literal["linux", "windows"] = "linux"
    """`windows`: the image is a Windows without a guest server; it is logged in and saved before its first use."""
    login_mark: Path | None = None
    """An image cut from a screenshot of that Windows' password prompt, to recognise the prompt."""
    memory_mb: int | None = Field(default=None, ge=128)
    """None means the default of the image."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    open_network: bool = False
    uefi: bool = False
    """Whether `image` boots by UEFI."""
    password: SecretStr | None = None
    """The administrator password of a Windows image; only from the environment."""


def add_options(group: OptionGroup) -> None:
    group.option("image", type=Path, help="a qcow2 image with OSWorld's guest server")
    group.option("memory_mb", "--vm-memory-mb", type=int, help="memory of a virtual machine")
    group.option("accelerator", choices=("auto", "kvm", "tcg"), help="auto (default) tests KVM")
    group.option("os_type", choices=("linux", "windows"), help="of --image (default linux)")
    group.option("login_mark", type=Path, help="image of a part of Windows' password prompt")
    group.flag("open_network", "virtual machines reach the network")
    group.flag("uefi", "the image boots by UEFI (needs the Debian package ovmf)")


def make(settings: "Settings") -> "Provider":
    from env_server.providers.qemu.provider import QemuProvider

    own = settings.of(QemuSettings)
    password = own.password.get_secret_value() if own.password else None
    return QemuProvider(images=settings.state_dir, screen_size=settings.screen, **{**dict(own), "password": password})


KIND = ProviderKind(
    name="qemu",
    settings=QemuSettings,
    add_options=add_options,
    make=make,
    variables={"password": PASSWORD_VARIABLE},
)
