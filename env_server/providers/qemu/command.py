"""The command line of one virtual machine. Pure: the same machine always gets the same arguments, and a saved state
fits only the machine that it was saved from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Accelerator = Literal["kvm", "tcg"]

GUEST_PORT = 5000
TRANSLATION_CACHE_MB = 96
"""Memory that TCG may use for translated code, in each machine."""
_BYTES_PER_PIXEL = 4
_SMALLEST_VIDEO_MB = 16
_VIRTUAL_DEVICES = (
    "-device", "virtio-keyboard-pci", "-device", "virtio-tablet-pci",
    "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci",
)  # fmt: skip
_PLAIN_DEVICES = (
    # the machine type `pc` has a PS/2 keyboard
    "-device", "qemu-xhci", "-device", "usb-tablet", "-device", "e1000,netdev=net,romfile=",
)  # fmt: skip
_WINDOWS_CPU = ",hv_relaxed,hv_vapic,hv_spinlocks=0x1fff,hv_time"
"""Hyper-V features that Windows expects of a virtual processor; without them timers take half of the CPU time."""


@dataclass(frozen=True, kw_only=True)
class Firmware:
    """UEFI: OVMF's code, read-only, and a template of its variables, of which each machine gets a copy."""

    code: Path
    variables: Path


@dataclass(frozen=True, kw_only=True)
class DirectBoot:
    """A kernel that QEMU itself loads, without the disk's boot loader."""

    kernel: Path
    initrd: Path | None
    command_line: str


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """Everything about a machine that its saved state depends on."""

    screen_size: tuple[int, int]
    memory_mb: int
    num_cpus: int
    accelerator: Accelerator
    disks: tuple[Path, ...]
    """The chain under the overlay, from its direct parent down to the base; every file is qcow2, opened read-only."""
    boot: DirectBoot | None = None
    firmware: Firmware | None = None
    files_archive: Path | None = None
    """Our own guest files, as a second read-only disk; a CD-ROM if the hardware is plain."""
    hardware: Literal["virtual", "plain"] = "virtual"
    """`plain`: hardware that every system has drivers for, also a fresh Windows: IDE, a USB tablet, an Intel network
    card, and a clock in local time."""
    guest_port: int = GUEST_PORT
    """Port of the guest's server; QEMU forwards the same port of its sandbox's loopback to it."""


@dataclass(frozen=True, kw_only=True)
class Attachments:
    """The inherited file descriptors of one start of a machine."""

    memory_fd: int
    overlay_fd: int
    qmp_fd: int
    wake_fd: int
    shares_ram: bool
    """True while a state is saved: the machine's writes go to the memory file. False maps it copy-on-write."""
    variables_fd: int | None = None
    """The machine's own copy of UEFI's variables."""
    waits_for_state: bool = False
    open_network: bool = False


def qemu_arguments(spec: MachineSpec, attached: Attachments) -> list[str]:
    """All arguments after the program's name."""
    return [
        *_board(spec, attached),
        *_boot(spec, attached),
        *_disks(spec, attached),
        *_devices(spec, attached),
        *(("-incoming", "defer") if attached.waits_for_state else ()),
    ]


def _board(spec: MachineSpec, attached: Attachments) -> list[str]:
    share = "on" if attached.shares_ram else "off"
    tcg = f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MB}"
    ram = {"qom-type": "memory-backend-file", "id": "ram", "size": spec.memory_mb << 20, "share": share == "on"}
    ram |= {"mem-path": f"/proc/self/fd/{attached.memory_fd}"}
    kvm_cpu = "host,migratable=on" + (_WINDOWS_CPU if spec.hardware == "plain" else "")
    return [
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-name", "desktop", "-accel", tcg if spec.accelerator == "tcg" else "kvm",
        "-machine", "pc,memory-backend=ram,vmport=off", "-object", json.dumps(ram),
        "-cpu", "max" if spec.accelerator == "tcg" else kvm_cpu,
        "-smp", str(spec.num_cpus), "-m", str(spec.memory_mb),
        "-rtc", f"base={'localtime' if spec.hardware == 'plain' else 'utc'},clock=host",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]  # fmt: skip


def _boot(spec: MachineSpec, attached: Attachments) -> list[str]:
    arguments: list[str] = []
    if spec.firmware is not None:
        assert attached.variables_fd is not None, "UEFI needs its variables"
        arguments += _blockdev("code", "raw", str(spec.firmware.code), read_only=True)
        arguments += ["-add-fd", f"fd={attached.variables_fd},set=2"]
        arguments += _blockdev("variables", "raw", "/dev/fdset/2")
        arguments += ["-machine", "pflash0=code,pflash1=variables"]
    if spec.boot is not None:
        arguments += ["-kernel", str(spec.boot.kernel), "-append", spec.boot.command_line]
        if spec.boot.initrd is not None:
            arguments += ["-initrd", str(spec.boot.initrd)]
    return arguments


def _disks(spec: MachineSpec, attached: Attachments) -> list[str]:
    below: dict[str, Any] | None = None
    for path in reversed(spec.disks):
        below = _qcow2(str(path), below) | {"read-only": True}
    overlay = _qcow2("/dev/fdset/1", below) | {"node-name": "disk", "discard": "unmap"}
    arguments = ["-add-fd", f"fd={attached.overlay_fd},set=1", "-blockdev", json.dumps(overlay)]
    disk, files = ("ide-hd,bus=ide.0", "ide-cd,bus=ide.1") if spec.hardware == "plain" else ("virtio-blk-pci",) * 2
    arguments += ["-device", f"{disk},drive=disk,bootindex=1"]
    if spec.files_archive is not None:
        arguments += _blockdev("files", "raw", str(spec.files_archive), read_only=True)
        arguments += ["-device", f"{files},drive=files"]
    return arguments


def _qcow2(filename: str, backing: Mapping[str, Any] | None) -> dict[str, Any]:
    file = {"driver": "file", "filename": filename, "locking": "off"}
    cache = {"direct": False, "no-flush": True}  # an overlay is not kept after its machine or the host ends
    node: dict[str, Any] = {"driver": "qcow2", "file": file, "cache": cache}
    # An explicit backing file overrides the one that the qcow2 file names.
    return node if backing is None else node | {"backing": dict(backing)}


def _blockdev(name: str, driver: str, filename: str, *, read_only: bool = False) -> list[str]:
    file = {"driver": "file", "filename": filename, "locking": "off", "read-only": read_only}
    return ["-blockdev", json.dumps({"driver": driver, "node-name": name, "read-only": read_only, "file": file})]


def _devices(spec: MachineSpec, attached: Attachments) -> list[str]:
    width, height = spec.screen_size
    port, restrict = spec.guest_port, "off" if attached.open_network else "on"
    return [
        "-device", f"VGA,edid=on,xres={width},yres={height},vgamem_mb={video_memory_mb(width, height)}",
        "-netdev", f"user,id=net,ipv6=off,restrict={restrict},hostfwd=tcp:127.0.0.1:{port}-:{port}",
        *(_PLAIN_DEVICES if spec.hardware == "plain" else _VIRTUAL_DEVICES), "-device", "vmgenid,guid=auto",
        "-chardev", f"socket,id=qmp,fd={attached.qmp_fd}", "-mon", "chardev=qmp,mode=control",
        "-chardev", "stdio,id=console,signal=off", "-device", "isa-serial,chardev=console",
        "-chardev", f"socket,id=wake,fd={attached.wake_fd}", "-device", "isa-serial,chardev=wake",
    ]  # fmt: skip


def video_memory_mb(width: int, height: int) -> int:
    """Space for two screens, which the driver in the guest requires; QEMU accepts powers of two."""
    size_mb = _SMALLEST_VIDEO_MB
    while size_mb << 20 < 2 * width * height * _BYTES_PER_PIXEL:
        size_mb *= 2
    return size_mb
