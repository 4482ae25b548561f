"""The source of a machine's disk: our own Debian image, or a disk image of the user's. Each defines how it boots, its
digest, when it is ready, and what a restored desktop must be sent."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Awaitable
from pathlib import Path
from typing import Literal, Protocol

from env_server.providers.files import keep_newest, write_whole
from env_server.providers.qemu.accelerator import choose_accelerator
from env_server.providers.qemu.build import BUILD_LIMIT_S, BaseImage, find_image
from env_server.providers.qemu.command import DirectBoot, Firmware, MachineSpec
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.guest import MachineGuest
from env_server.providers.qemu.guest_files import digest_of, guest_archive
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.qmp_input import QmpInput
from env_server.providers.qemu.readiness import wait_for_agent
from env_server.providers.qemu.saved_state import KEPT_STATES
from osworld_pipeline.domain.shown_commands import ENV_SERVER, shell_line
from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

OWN_MEMORY_MB = 1024
FOREIGN_MEMORY_MB = 4096
KERNEL_OPTIONS = "root=/dev/vda rw init=/sbin/desktop-init console=ttyS0 quiet net.ifnames=0 mitigations=off"
KERNEL_OPTIONS += " random.trust_cpu=on drm_kms_helper.fbdev_emulation=0 panic=-1"
_BACKING_FILE = slice(8, 16)
"""The place in a qcow2 file of the offset of its backing file's name; zeros for none."""
_CHUNK_BYTES = 1 << 22
_CLOCK_LIMIT_S = 20.0

Wanted = Literal["auto", "kvm", "tcg"]


class ImageSource(Protocol):
    memory_mb: int
    num_boots: int
    """Number of attempts to boot a machine; if the last one fails, its error is raised."""

    async def prepare(
        self, images: Path, *, accelerator: Wanted, screen_size: tuple[int, int]
    ) -> tuple[str, MachineSpec]:
        """The image's digest, and the machine that boots it. May build the image."""
        ...

    async def bring_up(self, machine: Machine, *, folder: Path) -> None:
        """Returns once a booted machine is in the state that every desktop starts from; screenshots of failures go
        below `folder`. The caller limits the total time."""
        ...

    def make_guest(
        self, socket_path: str, *, name: str, display: Display, keys: QmpInput, silence_s: float
    ) -> MachineGuest:
        """The client of a restored machine's guest, whose server is reached at that socket."""
        ...

    async def wake(self, machine: Machine, guest: MachineGuest) -> None:
        """Sets the clock, the random numbers and the network of a machine that has just been restored."""
        ...


class ImageWithAgent:
    """Common parts of images whose system starts a server with OSWorld's guest protocol."""

    draws_cursor: bool
    """Whether the guest draws its mouse cursor into the screen that QEMU shows."""
    calm_s: float
    """How long the screen of a booted machine must be stable before it counts as ready."""
    num_boots = 1

    async def bring_up(self, machine: Machine, *, folder: Path) -> None:
        await wait_for_agent(machine, calm_s=self.calm_s)

    def make_guest(
        self, socket_path: str, *, name: str, display: Display, keys: QmpInput, silence_s: float
    ) -> MachineGuest:
        return MachineGuest(
            socket_path, name=name, display=display, keys=keys, reads_display=self.draws_cursor, silence_s=silence_s
        )


class OwnImage(ImageWithAgent):
    """Our Debian image."""

    draws_cursor = True
    calm_s = 1.0

    def __init__(self, *, memory_mb: int | None = None) -> None:
        self.memory_mb = memory_mb or OWN_MEMORY_MB

    async def prepare(
        self, images: Path, *, accelerator: Wanted, screen_size: tuple[int, int]
    ) -> tuple[str, MachineSpec]:
        base = await build_in_child(images)
        chosen = await choose_accelerator(accelerator, kernel=base.kernel, initrd=base.initrd, state_dir=images)
        archive = await asyncio.to_thread(guest_archive)
        digest = hashlib.sha256(f"{base.digest} {digest_of(archive)}".encode()).hexdigest()
        files = images / f"files-{digest_of(archive)[:24]}.tar"
        await asyncio.to_thread(write_whole, files, archive)
        keep_newest(images, "files-*.tar", KEPT_STATES)
        width, height = screen_size
        boot = DirectBoot(
            kernel=base.kernel,
            initrd=base.initrd,
            command_line=f"{KERNEL_OPTIONS} desktop.size={width}x{height}",
        )
        return digest, MachineSpec(
            screen_size=screen_size,
            memory_mb=self.memory_mb,
            num_cpus=1,
            accelerator=chosen,
            disks=(base.disk,),
            boot=boot,
            files_archive=files,
        )

    async def wake(self, machine: Machine, guest: MachineGuest) -> None:
        await machine.wake()


class ForeignImage(ImageWithAgent):
    """A qcow2 disk image whose system starts OSWorld's guest server by itself. It is never written to."""

    draws_cursor = False
    calm_s = 5.0

    def __init__(
        self,
        path: Path,
        *,
        memory_mb: int | None = None,
        firmware: Firmware | None = None,
        boot: DirectBoot | None = None,
        files_archive: Path | None = None,
        password: str = "password",  # noqa: S107 - of OSWorld's published images
    ) -> None:
        if not path.is_file():
            raise DependencyError(f"there is no disk image {path}; name an existing qcow2 file")
        with path.open("rb") as file:
            header = file.read(_BACKING_FILE.stop)
        if not header.startswith(b"QFI\xfb"):
            raise DependencyError(f"{path} is not a qcow2 image; convert it with `qemu-img convert -O qcow2`")
        if any(header[_BACKING_FILE]):
            raise DependencyError(
                f"{path} has a backing file, which QEMU cannot see; merge both with `qemu-img convert -O qcow2`"
            )
        self._path, self._firmware, self._boot = path.absolute(), firmware, boot
        self._files_archive, self._password = files_archive, password
        self.memory_mb = memory_mb or FOREIGN_MEMORY_MB

    async def prepare(
        self, images: Path, *, accelerator: Wanted, screen_size: tuple[int, int]
    ) -> tuple[str, MachineSpec]:
        digest = await asyncio.to_thread(self._digest, images)
        if self._files_archive is not None:
            archive = await asyncio.to_thread(self._files_archive.read_bytes)
            digest = hashlib.sha256(f"{digest} {digest_of(archive)}".encode()).hexdigest()
        if accelerator != "tcg":
            base = await build_in_child(images)  # its kernel is used to test KVM
            accelerator = await choose_accelerator(
                accelerator, kernel=base.kernel, initrd=base.initrd, state_dir=images
            )
        return digest, MachineSpec(
            screen_size=screen_size,
            memory_mb=self.memory_mb,
            num_cpus=1 if accelerator == "tcg" else 2,
            accelerator=accelerator,
            disks=(self._path,),
            boot=self._boot,
            firmware=self._firmware,
            files_archive=self._files_archive,
        )

    def _digest(self, images: Path) -> str:
        """SHA-256 of the file, cached while its size and time stay the same."""
        facts = self._path.stat()
        key = hashlib.sha256(f"{self._path} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}".encode()).hexdigest()
        cache = images / f"digest-{key[:24]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads(cache.read_text())["sha256"])
        digest = hashlib.sha256()
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        write_whole(cache, json.dumps({"path": str(self._path), "sha256": digest.hexdigest()}).encode())
        return digest.hexdigest()

    async def wake(self, machine: Machine, guest: MachineGuest) -> None:
        """After a restore the emulated clock is right; root in the guest sets the guest's own clock from it. Best
        effort: not every image has sudo or this password. The kernel reseeds its random numbers by itself (vmgenid)."""
        script = f"printf '%s\\n' {shlex.quote(self._password)} | sudo -S -k hwclock --hctosys --utc"
        setting = guest.execute(["/bin/sh", "-c", script], timeout_s=_CLOCK_LIMIT_S)
        await _if_possible(setting, "setting a foreign guest's clock")


async def _if_possible(attempt: Awaitable[object], what: str) -> None:
    try:
        await attempt
    except ReplicaError as error:
        log.info("%s failed: %s", what, error)


async def build_in_child(images: Path) -> BaseImage:
    """Builds in a separate process, so that a cancelled or terminated caller does not wait for the build."""
    image = find_image(images)
    if image is not None:
        return image
    to_see = f"to see its output, run {shell_line(ENV_SERVER, 'build-image', '--state-dir', images)}"
    log.info("building the virtual machines' image below %s; this takes a minute or two, once", images)
    process = await asyncio.create_subprocess_exec(
        *(*python_module("env_server.providers.qemu.build"), "--state-dir", str(images)),
        *("--die-with-parent", str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(BUILD_LIMIT_S):
            _, said = await process.communicate()
    except TimeoutError as error:
        raise DependencyError(f"the image was not built within {BUILD_LIMIT_S:g} s: {to_see}") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    image = find_image(images)
    if image is None:
        reason = said.decode("utf-8", "replace").strip().splitlines()
        status = f"the image build ended with exit status {process.returncode} and no message"
        raise DependencyError(reason[-1] if reason else f"{status}: {to_see}")
    return image
