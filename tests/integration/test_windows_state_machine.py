"""The bring-up of a Windows image on a real machine. Our Debian disk is used instead, with a login on a text screen, a
disc with tools, and no program inside that speaks the guest protocol."""

import asyncio
import io
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.qemu.bring_up import (
    BringUp,
    BroughtUp,
    Sight,
    Sign,
    Stage,
    is_answered,
    shows_mark,
)
from env_server.providers.qemu.build import BaseImage
from env_server.providers.qemu.command import DirectBoot, MachineSpec
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.file_channel import CHANNEL_PORT, READY_ANSWER, FileChannel
from env_server.providers.qemu.guest import MachineGuest
from env_server.providers.qemu.images import Wanted, build_in_child
from env_server.providers.qemu.machine import Machine
from env_server.providers.qemu.provider import QemuDesktop, QemuProvider
from env_server.providers.qemu.qmp_input import QmpInput
from env_server.providers.qemu.screen_view import Mark, find_mark
from env_server.providers.qemu.tools_disc import ensure_disc
from env_server.providers.qemu.windows_guest import WindowsGuest
from env_server.providers.qemu.windows_image import press, write
from osworld_pipeline.errors import ReplicaError

PROGRAMS = ("qemu-system-x86_64", "qemu-img", "mmdebstrap", "mke2fs", "setpriv", "genisoimage")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.defpath}:/usr/sbin:/sbin") is None]
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("OSWORLD_WINDOWS_GUEST" not in os.environ, reason="takes minutes: make test-windows"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"no such machines here: {', '.join(MISSING)} missing (osworld-pipeline setup qemu)"
    ),
]
IMAGES = Path(__file__).parents[2] / "var/test-images/qemu"
"""Where tests of virtual machines keep the disk that they share."""
SCREEN = (1024, 768)
CONSOLE = (
    "root=/dev/vda rw quiet net.ifnames=0 mitigations=off random.trust_cpu=on panic=-1 console=tty0 init=/bin/sh -- -c "
    '"while :; do setsid -w agetty tty1 linux; done"'
)
START = """\
ip addr add 10.0.2.15/24 dev eth0
ip link set lo up
ip link set eth0 up
for device in /dev/input/event*; do setsid cat $device > /tmp/events-${device##*/} & done
setsid python3 /mnt/files.py > /dev/null 2>&1 &
"""
FILES = f"""\
import http.server, pathlib, urllib.parse
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = urllib.parse.unquote(self.path)
        try:
            data = {READY_ANSWER!r} if path == "/" else pathlib.Path(path).read_bytes()
        except OSError:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.ThreadingHTTPServer(("", {CHANNEL_PORT}), Handler).serve_forever()
"""
LINE_HEIGHT = 16
LOGIN_LINE = 3
PASSWORD_LINE = 4
"""Of the text screen, counted from 0: issue and login stand above."""


def shows_login() -> Sign:
    """The kernel writes below the firmware's text, which starts at line 0, until the login clears the screen and leaves
    line 0 empty."""
    words = shows_words(line=LOGIN_LINE, still_s=4.0).is_there

    async def is_there(sight: Sight) -> bool:
        if sight.screen.size != SCREEN or first_lit_row(sight.screen) < LINE_HEIGHT:
            return False
        return await words(sight)

    return Sign(words="login on a screen of the kernel's", is_there=is_there)


def lit_box(screen: Image.Image) -> tuple[int, int, int, int] | None:
    return screen.convert("L").point([255 * (value > 60) for value in range(256)]).getbbox()


def first_lit_row(screen: Image.Image) -> int:
    box = lit_box(screen)
    return screen.height if box is None else box[1]


def shows_words(*, line: int, still_s: float) -> Sign:
    """Text is on this line or below it. Typed text is above this line, and a caret is narrower."""

    async def is_there(sight: Sight) -> bool:
        box = lit_box(sight.screen.crop((0, line * LINE_HEIGHT, *sight.screen.size)))
        return box is not None and box[2] - box[0] > 2 * LINE_HEIGHT and sight.still_s >= still_s

    return Sign(words=f"word on line {line} or below", is_there=is_there)


class TextLogin:
    """An ImageSource, like WindowsImage."""

    memory_mb = 512
    num_boots = 1

    def __init__(self, base: BaseImage) -> None:
        self.base = base
        self.done: list[BroughtUp] = []

    async def prepare(
        self, images: Path, *, accelerator: Wanted, screen_size: tuple[int, int]
    ) -> tuple[str, MachineSpec]:
        base = self.base
        disc = await asyncio.to_thread(ensure_disc, images, {"start.sh": START.encode(), "files.py": FILES.encode()})
        return base.digest, MachineSpec(
            screen_size=screen_size,
            memory_mb=self.memory_mb,
            num_cpus=1,
            accelerator="tcg",
            disks=(base.disk,),
            boot=DirectBoot(kernel=base.kernel, initrd=base.initrd, command_line=CONSOLE),
            files_archive=disc,
            guest_port=CHANNEL_PORT,
        )

    def stages(self, channel: FileChannel) -> Sequence[Stage]:
        asked, let_in = (shows_words(line=PASSWORD_LINE + more, still_s=1.0) for more in (0, 1))
        start = "echo password | sudo -S sh -c 'mount /dev/vdb /mnt; sh /mnt/start.sh'; clear\n"
        return (
            Stage(name="the start", until=shows_login(), limit_s=600),
            Stage(name="the password prompt", do=(write("user\n"),), until=asked, limit_s=120),
            Stage(name="the login", do=(write("password"), press("enter")), until=let_in, limit_s=240),
            Stage(
                name="the file server",
                do=(write(start),),
                until=is_answered("the server", channel.is_ready),
                limit_s=240,
            ),
        )

    async def bring_up(self, machine: Machine, *, folder: Path) -> None:
        display = Display(machine.qmp, name=machine.name)
        channel = FileChannel(machine.guest_socket, name=machine.name)
        keys = QmpInput(machine.qmp, screen_size=machine.spec.screen_size)
        try:
            way = BringUp(machine.name, eyes=display, hands=keys, is_alive=machine.is_alive, folder=folder)
            self.done = await way.run(self.stages(channel))
        finally:
            await channel.close()
            display.close()

    def make_guest(
        self, socket_path: str, *, name: str, display: Display, keys: QmpInput, silence_s: float
    ) -> MachineGuest:
        return WindowsGuest(FileChannel(socket_path, name=name), socket_path, name=name, display=display, keys=keys)

    async def wake(self, machine: Machine, guest: MachineGuest) -> None:
        assert await guest.platform() == "Windows"


class NeverUp(TextLogin):
    """Gives up on every machine as soon as it runs."""

    memory_mb = 384  # so that it uses no saved state of another image
    num_boots = 3

    def __init__(self, base: BaseImage) -> None:
        super().__init__(base)
        self.machines: list[Machine] = []

    async def bring_up(self, machine: Machine, *, folder: Path) -> None:
        self.machines.append(machine)
        assert machine.is_alive()
        raise ReplicaError(f"no login on machine {len(self.machines)}")


@pytest.fixture(scope="module")
def base() -> BaseImage:
    return asyncio.run(build_in_child(IMAGES))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a saved state: the first test makes one, and the others start from it."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture
async def desktop(base: BaseImage, images: Path) -> AsyncIterator[QemuDesktop]:
    source = TextLogin(base)
    provider = QemuProvider(images=images, screen_size=SCREEN, accelerator="tcg", source=source)
    try:
        started = time.monotonic()
        desktop = await provider.start("replica-0")
        print(f"up after {time.monotonic() - started:.1f} s; stages gone through: {source.done}")
        yield desktop
    finally:
        await provider.close()


async def file_of(desktop: QemuDesktop, path: str, *, limit_s: float = 120.0) -> bytes:
    """The content of the file, once there is any."""
    until = time.monotonic() + limit_s
    while True:
        data = await desktop.guest.file(path)
        if data:
            return data
        assert time.monotonic() < until, f"nothing in {path} within {limit_s:g} s"
        await asyncio.sleep(0.2)


def call(name: str, *args: object) -> GuestCall:
    return GuestCall(name=name, args=args)


async def absolute_moves(guest: GuestClient) -> list[tuple[int, int]]:
    """(axis, value) of each move so far. A kernel event has 24 bytes: its kind (3 is EV_ABS) at byte 16, then axis
    and value."""
    seen = [await guest.file(f"/tmp/events-event{number}") or b"" for number in range(6)]
    return [
        (int.from_bytes(data[at + 18 : at + 20], "little"), int.from_bytes(data[at + 20 : at + 24], "little"))
        for data in seen
        for at in range(0, len(data) - 23, 24)
        if int.from_bytes(data[at + 16 : at + 18], "little") == 3
    ]


async def test_a_machine_is_logged_in_by_keys_and_restored_with_its_file_channel(desktop: QemuDesktop) -> None:
    guest = desktop.guest
    assert await guest.screen_size() == SCREEN
    assert Image.open(io.BytesIO(await guest.screenshot("png"))).size == SCREEN
    # Typing, with every kind of key that a path and a redirection need.
    await guest.act([call("write", 'echo "By <KEYS> & Shift_1!" > /tmp/typed\n')])
    assert await file_of(desktop, "/tmp/typed") == b"By <KEYS> & Shift_1!\n"
    # The absolute mouse.
    await guest.act([call("moveTo", 1023, 0)])
    until = time.monotonic() + 60.0
    while (0, 0x7FFF) not in await absolute_moves(guest):
        assert time.monotonic() < until, "the pointer did not arrive"
        await asyncio.sleep(0.2)
    # A piece that is cut from the screen is found again at its place.
    screen = Image.open(io.BytesIO(await guest.screenshot("png"))).convert("RGB")
    top = next(y for y in range(0, 700, 8) if len(screen.crop((0, y, 64, y + 16)).getcolors() or ()) > 1)
    assert find_mark(screen, screen.crop((0, top, 64, top + 16))) == (0, top)
    # A reset starts another machine from the same state: copy-on-write, and without any earlier change.
    old_pid, started = desktop.machine.pid, time.monotonic()
    await desktop.reset()
    print(f"restored in {time.monotonic() - started:.2f} s, overlay {desktop.machine.overlay_bytes() / 1e6:.1f} MB")
    assert desktop.machine.pid != old_pid
    assert await desktop.guest.file("/tmp/typed") is None
    await desktop.guest.act([call("write", "echo again > /tmp/typed\n")])
    assert await file_of(desktop, "/tmp/typed") == b"again\n"


async def test_the_error_of_a_stage_that_is_not_reached_says_where_its_screenshot_is(
    desktop: QemuDesktop, tmp_path: Path
) -> None:
    machine = desktop.machine
    display = Display(machine.qmp, name="a look")
    keys = QmpInput(machine.qmp, screen_size=SCREEN)
    way = BringUp("the machine", eyes=display, hands=keys, is_alive=machine.is_alive, folder=tmp_path)
    nowhere = shows_mark(Mark("nowhere", Image.effect_noise((32, 16), 80).convert("RGB")))
    try:
        with pytest.raises(ReplicaError, match="did not get past the prompt") as caught:
            await way.run([Stage(name="the prompt", until=nowhere, limit_s=1.0)])
    finally:
        display.close()
    (path,) = await asyncio.to_thread(lambda: list((tmp_path / "failed-boots").iterdir()))
    assert str(path) in str(caught.value)
    with Image.open(path) as picture:
        assert picture.size == SCREEN


async def test_machine_that_does_not_come_up_is_booted_three_times_and_leaves_nothing(
    base: BaseImage, tmp_path: Path
) -> None:
    source = NeverUp(base)
    provider = QemuProvider(images=tmp_path, screen_size=SCREEN, accelerator="tcg", source=source)
    try:
        with pytest.raises(ReplicaError, match="no login on machine 3"):
            await provider.start("replica-0")
    finally:
        await provider.close()
    assert [machine.is_alive() for machine in source.machines] == [False] * 3
    left = await asyncio.to_thread(lambda: [path.name for path in tmp_path.iterdir() if path.is_dir()])
    assert left == [], "no state, and nothing of the attempts"
