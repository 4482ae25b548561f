"""The settings of the provider `qemu`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SecretStr

from env_server.providers.kinds import ProviderKind
from env_server.providers.qemu import PASSWORD_VARIABLE
from env_server.table import Option, Table

if TYPE_CHECKING:
    from env_server.protocols import Provider
    from env_server.settings import Settings


class QemuSettings(Table):
    """Virtual machines on this machine."""

    image: Annotated[Path | None, Option(), Field(examples=["Ubuntu.qcow2"])] = None
    """Any qcow2 image with OSWorld's guest server on port 5000. Without it our own is used, which `env-server
    build-image` or the first start builds."""
    os_type: Annotated[Literal["linux", "windows"], Option()] = "linux"
    """`windows`: the image is a Windows without a guest server; it is logged in and saved before its first use (set
    WINDOWS_ADMIN_PASSWORD)."""
    login_mark: Annotated[Path | None, Option(), Field(examples=["prompt.png"])] = None
    """An image cut from a screenshot of that Windows' password prompt, to recognise the prompt."""
    memory_mb: Annotated[int | None, Option("--vm-memory-mb"), Field(ge=128, examples=[1024])] = None
    """Memory of one virtual machine. Without it the default of the image."""
    accelerator: Annotated[Literal["auto", "kvm", "tcg"], Option()] = "auto"
    """`auto` tests whether a guest boots under KVM."""
    open_network: Annotated[bool, Option()] = False
    """Virtual machines reach the network."""
    uefi: Annotated[bool, Option()] = False
    """The image boots by UEFI; needs the Debian package ovmf."""
    password: SecretStr | None = None
    """The administrator password of a Windows image; only from the environment."""


def make(settings: "Settings") -> "Provider":
    from env_server.providers.qemu.provider import QemuProvider

    own = settings.of(QemuSettings)
    password = own.password.get_secret_value() if own.password else None
    return QemuProvider(images=settings.state_dir, screen_size=settings.screen, **{**dict(own), "password": password})


KIND = ProviderKind(
    name="qemu",
    settings=QemuSettings,
    make=make,
    variables={"password": PASSWORD_VARIABLE},
)
