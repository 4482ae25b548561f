"""The `qemu` provider: every desktop is a virtual machine restored from one saved state, its memory mapped
copy-on-write and its disk an overlay. A reset discards the machine and restores another, so no state of an episode
survives."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from env_server.providers.qemu.command import Accelerator, DirectBoot, Firmware, MachineSpec
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.guest import SILENCE_S, MachineGuest
from env_server.providers.qemu.images import ForeignImage, ImageSource, OwnImage, Wanted
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.memory import GuestMemory
from env_server.providers.qemu.programs import check_qemu, qemu_version
from env_server.providers.qemu.qmp_input import QmpInput
from env_server.providers.qemu.saved_state import SavedState, ensure_state, state_digest
from env_server.providers.qemu.walls import Walls
from env_server.providers.qemu.windows_image import WindowsImage
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

DEFAULT_SCREEN = (1920, 1080)
SMALLEST_SCREEN = (320, 200)
ANSWER_LIMIT_S = 60.0
"""Limit until a restored guest has returned its first screenshot."""
_OVMF = (
    Firmware(code=Path("/usr/share/OVMF/OVMF_CODE_4M.fd"), variables=Path("/usr/share/OVMF/OVMF_VARS_4M.fd")),
    Firmware(code=Path("/usr/share/OVMF/OVMF_CODE.fd"), variables=Path("/usr/share/OVMF/OVMF_VARS.fd")),
)


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """The common starting point of all desktops of this provider."""

    image_digest: str
    spec: MachineSpec
    """Spec of a restored machine: its disks begin with the saved one."""
    state: SavedState
    memory: GuestMemory
    """The memory of the saved state, sealed."""


class QemuProvider:
    """Makes desktops in virtual machines. `images` is the folder of built images and saved states; it is created if
    missing. `image` is a qcow2 file with OSWorld's guest server, or with `os_type` windows any Windows, whose
    administrator's `password` is typed at its first boot; without `image` our own is built. `source` replaces all of
    these."""

    def __init__(
        self,
        *,
        images: Path,
        screen_size: tuple[int, int] = DEFAULT_SCREEN,
        memory_mb: int | None = None,
        image: Path | None = None,
        accelerator: Wanted = "auto",
        open_network: bool = False,
        uefi: bool = False,
        os_type: Literal["linux", "windows"] = "linux",
        login_mark: Path | None = None,
        password: str | None = None,
        boot: DirectBoot | None = None,
        source: ImageSource | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        _check_screen(*screen_size)
        check_qemu(open_network=open_network)
        firmware = _find_firmware() if uefi else None
        if os_type == "windows" and source is None:
            if image is None:
                raise ValueError("Windows cannot be downloaded: name your own qcow2 image with --image")
            source = WindowsImage(
                image, memory_mb=memory_mb, firmware=firmware, password=password, login_mark=login_mark
            )
        if source is None and image is not None:
            source = ForeignImage(image, memory_mb=memory_mb, firmware=firmware, boot=boot)
        self._source: ImageSource = source or OwnImage(memory_mb=memory_mb)
        self._images, self._screen_size = images.absolute(), screen_size
        self._accelerator: Wanted = accelerator
        self._open_network, self._silence_s = open_network, silence_s
        self._ready: _Ready | None = None
        self._walls: Walls | None = None
        self._preparing = asyncio.Lock()
        self._desktops: set[QemuDesktop] = set()

    @property
    def name(self) -> str:
        return "qemu"

    @property
    def image_digest(self) -> str:
        """Known once the first desktop has been started, which may build the image; before that it is all zeros."""
        return self._ready.image_digest if self._ready else "0" * 64

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator of the machines; None before the first."""
        return self._ready.spec.accelerator if self._ready else None

    @property
    def details(self) -> str:
        if self._ready is None or self._walls is None:
            return ""
        return f"virtual machines under {self.accelerator}; {self._walls.bounds.description}"

    async def start(self, replica_id: str) -> "QemuDesktop":
        ready, walls = await self._prepare()
        desktop = QemuDesktop(
            self, replica_id, ready, walls, self._source, open_network=self._open_network, silence_s=self._silence_s
        )
        self._desktops.add(desktop)
        try:
            await desktop.reset()
        except BaseException:
            await desktop.stop()
            raise
        return desktop

    async def close(self) -> None:
        desktops, self._desktops = self._desktops, set()
        await asyncio.gather(*(desktop.stop() for desktop in desktops))
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.memory.close()
        walls, self._walls = self._walls, None
        if walls is not None:
            await walls.close()

    def forget(self, desktop: "QemuDesktop") -> None:
        self._desktops.discard(desktop)

    async def _prepare(self) -> tuple[_Ready, Walls]:
        async with self._preparing:
            if self._ready is None or self._walls is None or not self._ready.state.ram.exists():
                digest, spec = await self._source.prepare(
                    self._images, accelerator=self._accelerator, screen_size=self._screen_size
                )
                version = await asyncio.to_thread(qemu_version)
                if self._walls is None:
                    self._walls = await asyncio.to_thread(Walls.open, memory_mb=spec.memory_mb)
                name = state_digest(spec, image_digest=digest, qemu=version, host_cpu=_host_cpu())
                state = await self._ensure_state(name, spec, self._walls)
                if self._ready is not None:
                    self._ready.memory.close()
                memory = await asyncio.to_thread(GuestMemory.load, state.ram)
                self._ready = _Ready(image_digest=digest, spec=state.restored(spec), state=state, memory=memory)
            return self._ready, self._walls

    async def _ensure_state(self, digest: str, spec: MachineSpec, walls: Walls) -> SavedState:
        """Makes up to `num_boots` attempts, because a boot may fail by chance; the last failure is raised."""
        for _ in range(self._source.num_boots - 1):
            try:
                return await self._save(digest, spec, walls)
            except ReplicaError as error:
                log.warning("a machine is booted again, because: %s", error)
        return await self._save(digest, spec, walls)

    async def _save(self, digest: str, spec: MachineSpec, walls: Walls) -> SavedState:
        def is_ready(machine: Machine) -> Awaitable[None]:
            return self._source.bring_up(machine, folder=self._images)

        return await ensure_state(self._images, digest, spec, walls=walls, is_ready=is_ready)


class QemuDesktop:
    """One slot: a machine, and after each reset another one."""

    def __init__(
        self,
        provider: QemuProvider,
        replica_id: str,
        ready: _Ready,
        walls: Walls,
        source: ImageSource,
        *,
        open_network: bool,
        silence_s: float,
    ) -> None:
        self._provider, self._replica_id, self._source = provider, replica_id, source
        self._ready, self._walls = ready, walls
        self._open_network, self._silence_s = open_network, silence_s
        self._machine: Machine | None = None
        self._guest: MachineGuest | None = None
        self._is_stopped = False

    @property
    def guest(self) -> MachineGuest:
        if self._guest is None:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        return self._guest

    @property
    def machine(self) -> Machine:
        if self._machine is None:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        return self._machine

    async def reset(self) -> None:
        if self._is_stopped:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        await self._take_down()
        machine = Machine(self._ready.spec, self._walls, name=self._replica_id, open_network=self._open_network)
        guest: MachineGuest | None = None
        try:
            guest = await self._restore(machine)
            if self._is_stopped:
                raise ReplicaError(f"the desktop {self._replica_id} was stopped during its reset; start another")
        except BaseException:
            if guest is not None:
                await guest.close()
            await machine.stop()
            raise
        self._machine, self._guest = machine, guest

    async def _restore(self, machine: Machine) -> MachineGuest:
        state = self._ready.state
        await machine.start(
            overlay=state.overlay,
            memory=self._ready.memory,
            shares_ram=False,
            waits_for_state=True,
            variables=state.variables,
        )
        await machine.restore(state.devices)
        screen_size = self._ready.spec.screen_size
        guest = self._source.make_guest(
            machine.guest_socket,
            name=self._replica_id,
            display=Display(machine.qmp, name=self._replica_id),
            keys=QmpInput(machine.qmp, screen_size=screen_size),
            silence_s=self._silence_s,
        )
        try:
            await self._source.wake(machine, guest)
            await guest.screenshot("jpeg", timeout_s=ANSWER_LIMIT_S)
            if guest.is_silent and guest.has_agent:
                raise ReplicaError(f"the guest agent of {self._replica_id} did not answer after its restore")
        except BaseException:
            await guest.close()
            raise
        return guest

    def is_alive(self) -> bool:
        return self._machine is not None and self._machine.is_alive()

    async def stop(self) -> None:
        self._is_stopped = True
        self._provider.forget(self)
        await self._take_down()

    async def _take_down(self) -> None:
        machine, self._machine = self._machine, None
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.close()
        if machine is not None:
            await machine.stop()


def _check_screen(width: int, height: int) -> None:
    if width < SMALLEST_SCREEN[0] or height < SMALLEST_SCREEN[1]:
        raise ValueError(f"a screen of {width}x{height} is too small; the minimum is 320x200")
    if width % 8:
        raise ValueError(f"an emulated display's width must be a multiple of 8: use {width - width % 8}x{height}")


def _find_firmware() -> Firmware:
    for firmware in _OVMF:
        if firmware.code.exists() and firmware.variables.exists():
            return firmware
    raise DependencyError(f"UEFI needs the Debian package ovmf; run `{how_to_set_up('qemu')}`")


def _host_cpu() -> str:
    """The processor as a guest under KVM sees it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "microcode")))
