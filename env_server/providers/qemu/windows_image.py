"""A disk image with Windows and without our programs. It is booted once, logged in by keys, given the file server from
a disc, and saved; every desktop is then restored from that state."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from env_server.foreign_input import Call
from env_server.guest_client import GuestCall
from env_server.providers.qemu import PASSWORD_VARIABLE
from env_server.providers.qemu.bring_up import (
    BringUp,
    Sign,
    Stage,
    has_changed,
    is_answered,
    shows_mark,
    shows_something,
)
from env_server.providers.qemu.command import Firmware, MachineSpec
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.file_channel import CHANNEL_PORT, FileChannel
from env_server.providers.qemu.guest import MachineGuest
from env_server.providers.qemu.images import ForeignImage, Wanted
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.qmp_input import QmpInput, qcodes_of
from env_server.providers.qemu.screen_view import Mark
from env_server.providers.qemu.tools_disc import ensure_disc, windows_files
from env_server.providers.qemu.windows_guest import WindowsGuest
from osworld_pipeline.errors import ActionParseError, DependencyError, ReplicaError

BOOT_LIMIT_S = 600.0
LOGIN_LIMIT_S = 180.0
CHANNEL_LIMIT_S = 90.0
PROMPT_LIMIT_S = 30.0
WAKE_LIMIT_S = 20.0
WAKE_POLL_S = 0.2
START_TOOLS = r"cmd /c for %d in (D E F G H) do if exist %d:\start.cmd call %d:\start.cmd"
"""The disc gets the first free drive letter, which differs between computers."""


def press(*keys: str) -> Call:
    return GuestCall(name="hotkey" if len(keys) > 1 else "press", args=keys)


def write(text: str) -> Call:
    return GuestCall(name="write", args=(text,))


def windows_stages(password: str, channel: FileChannel, *, login_mark: Mark | None = None) -> tuple[Stage, ...]:
    """The stages from power-on to a desktop whose files can be read. Only the stage `the file server` shows that the
    login succeeded: no server is started at a lock screen."""
    prompt: Sign = shows_mark(login_mark) if login_mark is not None else has_changed(still_s=2.0)
    return (
        Stage(name="the start", until=shows_something(still_s=8.0), limit_s=BOOT_LIMIT_S),
        Stage(
            name="the password prompt",
            do=(press("ctrl", "alt", "delete"),),
            until=prompt,
            limit_s=PROMPT_LIMIT_S,
            num_tries=4,
        ),
        Stage(
            name="the login",
            do=(write(password), press("enter")),
            until=has_changed(still_s=8.0),
            limit_s=LOGIN_LIMIT_S,
        ),
        Stage(
            name="the file server",
            # Windows opens a menu or a manager of its own after the first login, which Escape closes.
            do=(press("esc"), press("win", "r"), GuestCall(name="sleep", args=(1.5,)), write(START_TOOLS + "\n")),
            until=is_answered("the guest's file server", channel.is_ready),
            limit_s=CHANNEL_LIMIT_S,
            num_tries=4,
        ),
        Stage(
            name="the desktop", do=(press("win", "d"),), until=shows_something(still_s=5.0), limit_s=PROMPT_LIMIT_S * 4
        ),
    )


class WindowsImage(ForeignImage):
    """`password` is its administrator's, typed on a US keyboard; `login_mark` is an image of the password prompt, for
    Windows versions where a changed screen does not prove that the prompt is there."""

    num_boots = 3

    def __init__(
        self,
        path: Path,
        *,
        password: str | None,
        memory_mb: int | None = None,
        firmware: Firmware | None = None,
        login_mark: Path | None = None,
    ) -> None:
        """
        Raises:
            DependencyError: no image, no password, or one that cannot be typed.
        """
        super().__init__(path, memory_mb=memory_mb, firmware=firmware)
        if not password:
            raise DependencyError(f"a Windows image needs its administrator's password: set {PASSWORD_VARIABLE}")
        try:
            for character in password:
                qcodes_of(character)
        except ActionParseError:
            raise DependencyError(
                f"{PASSWORD_VARIABLE} has a character that no key of a US keyboard types; change the password"
            ) from None
        self._windows_password = password
        self._mark = Mark.load(login_mark) if login_mark is not None else None

    async def prepare(
        self, images: Path, *, accelerator: Wanted, screen_size: tuple[int, int]
    ) -> tuple[str, MachineSpec]:
        self._files_archive = ensure_disc(images, windows_files())
        digest, spec = await super().prepare(images, accelerator=accelerator, screen_size=screen_size)
        return digest, replace(spec, hardware="plain", guest_port=CHANNEL_PORT)

    async def bring_up(self, machine: Machine, *, folder: Path) -> None:
        display = Display(machine.qmp, name=machine.name)
        channel = FileChannel(machine.guest_socket, name=machine.name)
        keys = QmpInput(machine.qmp, screen_size=machine.spec.screen_size)
        try:
            way = BringUp(machine.name, eyes=display, hands=keys, is_alive=machine.is_alive, folder=folder)
            await way.run(self.stages(channel))
        finally:
            await channel.close()
            display.close()

    def stages(self, channel: FileChannel) -> tuple[Stage, ...]:
        return windows_stages(self._windows_password, channel, login_mark=self._mark)

    def make_guest(
        self, socket_path: str, *, name: str, display: Display, keys: QmpInput, silence_s: float
    ) -> MachineGuest:
        return WindowsGuest(FileChannel(socket_path, name=name), socket_path, name=name, display=display, keys=keys)

    async def wake(self, machine: Machine, guest: MachineGuest) -> None:
        """Waits for the file server. The clock keeps the saved time: it cannot be set from outside."""
        until = time.monotonic() + WAKE_LIMIT_S
        while True:
            try:
                await guest.platform()
                return
            except ReplicaError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(WAKE_POLL_S)
