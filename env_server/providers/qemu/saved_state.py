"""A booted machine on disk: its memory as one file that every desktop maps copy-on-write, its devices, and its disk
after the boot. Made once for each digest; it appears by an atomic rename."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from env_server.providers.files import keep_newest, locked, make_readable, remove_leftovers
from env_server.providers.qemu.command import MachineSpec
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.memory import GuestMemory
from env_server.providers.qemu.programs import find
from env_server.providers.qemu.walls import Walls
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

SAVE_LIMIT_S = 900.0
"""Covers a first boot of a large foreign image under emulation, on a busy machine."""
KEPT_STATES = 4
"""Limit of all images, screen sizes and versions together. When another state is saved, those that were unused for the
longest time are removed."""
_TOOL_LIMIT_S = 300.0
_LEFTOVER_PREFIX = ".state-"

Ready = Callable[[Machine], Awaitable[None]]
"""Returns once the booted machine is in the state that every desktop starts from."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    folder: Path

    @property
    def ram(self) -> Path:
        return self.folder / "ram"

    @property
    def devices(self) -> Path:
        return self.folder / "devices"

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def files_archive(self) -> Path:
        """The second disk, which the machine no longer reads but still has."""
        return self.folder / "files.tar"

    @property
    def overlay(self) -> Path:
        """An empty overlay of the disk, to be copied."""
        return self.folder / "overlay.qcow2"

    @property
    def variables(self) -> Path | None:
        path = self.folder / "variables"
        return path if path.exists() else None

    def restored(self, spec: MachineSpec) -> MachineSpec:
        archive = self.files_archive if spec.files_archive is not None else None
        return replace(spec, disks=(self.disk, *spec.disks), files_archive=archive)


def state_digest(spec: MachineSpec, *, image_digest: str, qemu: str, host_cpu: str) -> str:
    """A digest of everything that a state depends on. `host_cpu` matters only under KVM, where the guest sees it."""
    parts = [image_digest, qemu, spec.screen_size, spec.memory_mb, spec.num_cpus, spec.accelerator, len(spec.disks)]
    parts += [spec.boot.command_line if spec.boot else None, spec.firmware is not None]
    parts += [host_cpu if spec.accelerator == "kvm" else None]
    parts += [] if spec.hardware == "virtual" else [spec.hardware, spec.guest_port]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def find_state(images: Path, digest: str) -> SavedState | None:
    folder = images / f"state-{digest[:24]}"
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)  # used again, so it is not the oldest
    return SavedState(folder=folder)


async def ensure_state(images: Path, digest: str, spec: MachineSpec, *, walls: Walls, is_ready: Ready) -> SavedState:
    """The state below `images`, created if it does not exist. Parallel callers wait for the first.

    Raises:
        DependencyError: disk space is missing, or another process holds the lock for too long.
        ReplicaError: the machine does not boot; the message ends with the last output of its console.
    """
    state = find_state(images, digest)
    if state is not None:
        return state
    with contextlib.ExitStack() as stack:
        try:
            await _acquire(stack, images / ".states.lock")
            state = find_state(images, digest)
            if state is not None:
                return state
            work = _begin(images, digest, stack)
            await _make(SavedState(folder=work), spec, walls, is_ready)
            return _publish(images, digest, work)
        except OSError as error:
            raise DependencyError(
                f"cannot save a booted machine below {images} ({error}); check space and access"
            ) from error


def _begin(images: Path, digest: str, stack: contextlib.ExitStack) -> Path:
    """A working folder, which the stack removes unless it has been published; with the lock held."""
    remove_leftovers(images, _LEFTOVER_PREFIX)
    work = Path(tempfile.mkdtemp(prefix=f"{_LEFTOVER_PREFIX}{digest[:24]}-", dir=images))
    stack.callback(shutil.rmtree, work, ignore_errors=True)
    return work


def _publish(images: Path, digest: str, work: Path) -> SavedState:
    folder = images / f"state-{digest[:24]}"
    make_readable(work)
    work.rename(folder)
    keep_newest(images, "state-*", KEPT_STATES)
    return SavedState(folder=folder)


async def _acquire(lock: contextlib.ExitStack, path: Path) -> None:
    """Waits without blocking the loop; a cancelled wait leaves no lock behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + SAVE_LIMIT_S
    while True:
        try:
            lock.enter_context(locked(path, limit_s=0.0))
            return
        except DependencyError:
            if time.monotonic() > until:
                raise DependencyError(
                    f"another process has held {path} for {SAVE_LIMIT_S:g} s; end that process, or wait for it"
                ) from None
            await asyncio.sleep(0.2)


async def _make(state: SavedState, spec: MachineSpec, walls: Walls, is_ready: Ready) -> None:
    started_at = time.monotonic()
    await asyncio.to_thread(_make_overlay, state.disk, spec.disks[0])
    if spec.files_archive is not None:
        shutil.copyfile(spec.files_archive, state.files_archive)
        spec = replace(spec, files_archive=state.files_archive)
    variables = None
    if spec.firmware is not None:
        variables = state.folder / "variables"
        shutil.copyfile(spec.firmware.variables, variables)
    memory = GuestMemory(spec.memory_mb << 20)
    machine = Machine(spec, walls, name=f"the machine to be saved in {state.folder.name}")
    try:
        async with asyncio.timeout(SAVE_LIMIT_S):
            await machine.start(
                overlay=state.disk, memory=memory, shares_ram=True, waits_for_state=False, variables=variables
            )
            log.info("booting a machine (%s) to save it; later desktops start from there", spec.accelerator)
            await is_ready(machine)
            await machine.save(state.devices)
            await machine.quit()
        await asyncio.to_thread(memory.save, state.ram)
    except TimeoutError as error:
        raise ReplicaError(
            f"the machine was not ready to be saved within {SAVE_LIMIT_S:g} s; its output: {machine.stderr_tail()}"
        ) from error
    except ReplicaError as error:
        raise ReplicaError(f"{error}. Its console output: {machine.stderr_tail()}") from error
    finally:
        await machine.stop()
        memory.close()
    await asyncio.to_thread(_make_overlay, state.overlay, state.disk)
    log.info("saved a booted machine after %.1f s", time.monotonic() - started_at)


def _make_overlay(path: Path, parent: Path) -> None:
    # The parent's absolute path is written into the file, but each start overrides it (see command.py).
    _tool("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(parent.absolute()), "-F", "qcow2", str(path))


def _tool(program: str, *arguments: str, may_fail: bool = False) -> None:
    try:
        subprocess.run(
            [find(program), *arguments], capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=not may_fail
        )
    except subprocess.CalledProcessError as error:
        raise DependencyError(f"{program} failed: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyError(f"{program} did not end within {_TOOL_LIMIT_S:g} s") from error
