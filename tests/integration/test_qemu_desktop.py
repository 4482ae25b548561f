"""Real virtual machines: our own image, the same image made to look foreign, and what is left of them."""

import asyncio
import io
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from env_server.driving.settle import wait_until_calm
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.qemu.command import GUEST_PORT, DirectBoot
from env_server.providers.qemu.guest_files import guest_archive
from env_server.providers.qemu.images import KERNEL_OPTIONS, ForeignImage, OwnImage, build_in_child
from env_server.providers.qemu.provider import QemuDesktop, QemuProvider
from osworld_pipeline.errors import ReplicaError

PROGRAMS = ("qemu-system-x86_64", "qemu-img", "mmdebstrap", "mke2fs", "setpriv")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.defpath}:/usr/sbin:/sbin") is None]
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"no virtual machines here: {', '.join(MISSING)} missing"),
]
REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "var/test-images/qemu"
"""Kept between runs: building the image and booting it once takes two minutes."""
SCREEN = (1024, 768)
WAIT_LIMIT_S = 60.0


@asynccontextmanager
async def desktops(**options: object) -> AsyncIterator[QemuProvider]:
    provider = QemuProvider(images=IMAGES, screen_size=SCREEN, accelerator="tcg", **options)  # pyright: ignore
    try:
        yield provider
    finally:
        await provider.close()


@pytest.fixture
async def desktop() -> AsyncIterator[QemuDesktop]:
    async with desktops() as provider:
        yield await provider.start("replica-0")


def call(name: str, *args: object, **kwargs: object) -> GuestCall:
    return GuestCall(name=name, args=args, kwargs=kwargs)


async def until(question: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + WAIT_LIMIT_S
    while not await question():
        assert time.monotonic() < end, f"{what} did not happen within {WAIT_LIMIT_S:g} s"
        await asyncio.sleep(0.1)


async def shell(guest: GuestClient, command: str) -> str:
    result = await guest.execute(command, shell=True, timeout_s=60.0)
    return (result.output + result.error).strip()


async def open_terminal(guest: GuestClient) -> None:
    """An xterm with a prompt that writes what it reads into ~/typed."""
    await guest.launch(["xterm", "-e", "cat > ~/typed"])

    async def reads() -> bool:
        return await guest.file("/home/user/typed") is not None

    await until(reads, "a terminal")
    await wait_until_calm(guest)


def typed(text: str, guest: GuestClient) -> Callable[[], Awaitable[bool]]:
    async def is_there() -> bool:
        return text.encode() in (await guest.file("/home/user/typed") or b"")

    return is_there


def children() -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        pids |= set(map(int, task.read_text().split()))
    return pids


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return fields["Private_Dirty"] / 1024


async def test_a_restored_desktop_shows_its_screen_and_has_the_current_time(desktop: QemuDesktop) -> None:
    guest = desktop.guest
    for image_format in ("png", "jpeg", "webp"):
        image = Image.open(io.BytesIO(await guest.screenshot(image_format)))
        assert (image.size, image.format) == (SCREEN, image_format.upper())
    assert await guest.screen_size() == SCREEN
    assert abs(float(await shell(guest, "date +%s.%N")) - time.time()) < 5.0
    ours = Image.open(io.BytesIO(await guest.screenshot())).convert("RGB")
    theirs = Image.open(io.BytesIO(await GuestClient.screenshot(guest))).convert("RGB")
    box = (400, 300, 640, 480)
    assert len(ours.crop(box).getcolors() or ()) > 1, "the mouse cursor is in the picture"
    difference = ImageChops.difference(ours, theirs).convert("L").getextrema()
    assert difference[1] <= 2, "what QEMU shows is what the X server draws"


async def test_live_pictures_show_each_change_of_the_screen_and_end_at_a_reset(desktop: QemuDesktop) -> None:
    guest = desktop.guest
    await wait_until_calm(guest)
    async with aclosing(guest.frames(width=512, interval_s=0.1)) as pictures:
        first, following = await anext(pictures), asyncio.ensure_future(anext(pictures))
        async with asyncio.timeout(WAIT_LIMIT_S):  # Windows may still appear after the start, then no new picture.
            while (await asyncio.wait([following], timeout=1.5))[0]:
                first, following = following.result(), asyncio.ensure_future(anext(pictures))
        before = Image.open(io.BytesIO(first))
        assert (before.format, before.size) == ("JPEG", (512, 384))
        await guest.act([call("moveTo", 900, 700)])
        after = Image.open(io.BytesIO(await asyncio.wait_for(following, WAIT_LIMIT_S)))
        changed = ImageChops.difference(before, after).convert("L").point([0] * 40 + [255] * 216).getbbox()
        assert changed is not None
        assert (changed[2] >= 450, changed[3] >= 350) == (True, True), "the mouse cursor has moved"
        await desktop.reset()
        with pytest.raises(ReplicaError):
            await anext(pictures)


async def test_input_files_and_commands_work_as_on_any_desktop(desktop: QemuDesktop) -> None:
    guest = desktop.guest
    await guest.upload("/home/user/Documents/note.txt", b"\x00smor\xc3\xa5s")
    assert await guest.file("/home/user/Documents/note.txt") == b"\x00smor\xc3\xa5s"
    assert await guest.file("/home/user/nothing") is None
    await guest.act([call("moveTo", 300, 200)])
    assert await guest.cursor_position() == (300, 200)
    await open_terminal(guest)
    await guest.act([call("write", "Hello <World> & smörgås €\n")])
    await until(typed("Hello <World> & smörgås €\n", guest), "the typed text")
    assert await shell(guest, "echo password | sudo -S id -u 2>/dev/null") == "0"
    assert "read_only" not in await guest.accessibility()


async def test_a_machine_has_no_network_and_shares_no_state_with_its_siblings() -> None:
    probe = "import socket; s = socket.socket(); s.settimeout(5); s.connect(('{}', {}))"
    async with desktops() as provider:
        first, second = await asyncio.gather(provider.start("replica-0"), provider.start("replica-1"))
        for address, port in (("10.0.2.2", GUEST_PORT), ("1.1.1.1", 53)):
            result = await first.guest.run_python(probe.format(address, port))
            assert result.returncode != 0, f"{address} was reached"
        random = "head -c 16 /dev/urandom | od -An -tx1"
        assert await shell(first.guest, random) != await shell(second.guest, random)
        await first.guest.upload("/home/user/of-the-first", b"x")
        assert await second.guest.file("/home/user/of-the-first") is None


async def test_a_reset_removes_every_change_and_is_fast(desktop: QemuDesktop) -> None:
    await desktop.guest.upload("/home/user/Desktop/left", b"x" * 5_000_000)
    await shell(desktop.guest, "echo password | sudo -S sh -c 'echo broken > /etc/hostname'; xmessage hi & sleep 1")
    old_pid = desktop.machine.pid
    times = []
    for _ in range(3):
        start = time.monotonic()
        await desktop.reset()
        times.append(time.monotonic() - start)
    assert old_pid is not None
    assert not is_running(old_pid)
    assert await desktop.guest.file("/home/user/Desktop/left") is None
    assert await shell(desktop.guest, "cat /etc/hostname") == "desktop"
    pid = desktop.machine.pid
    assert pid is not None
    print(f"resets {[round(t, 2) for t in times]} s, private {private_mb(pid):.0f} MB")
    assert min(times) < 10.0, "far above what it takes, for a busy machine"
    assert private_mb(pid) < 300
    assert desktop.machine.overlay_bytes() < 30_000_000


async def test_a_killed_machine_is_not_alive_and_its_guest_is_a_fault(desktop: QemuDesktop) -> None:
    assert desktop.is_alive()
    pid = desktop.machine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def is_dead() -> bool:
        return not desktop.is_alive()

    await until(is_dead, "its death")
    with pytest.raises(ReplicaError):
        await desktop.guest.execute(["true"])
    await desktop.reset()
    assert desktop.is_alive()


async def test_a_desktop_ends_when_its_agent_ends(desktop: QemuDesktop) -> None:
    with pytest.raises(ReplicaError):
        await desktop.guest.execute("pkill -KILL -f osworld_guest.agent; sleep 30", shell=True, timeout_s=20.0)

    async def is_dead() -> bool:
        return not desktop.is_alive()

    await until(is_dead, "the machine's end")


async def test_screen_and_keys_of_qemu_are_used_when_the_agent_does_not_answer() -> None:
    async with desktops(silence_s=3.0) as provider:
        desktop = await provider.start("replica-0")
        guest = desktop.guest
        await open_terminal(guest)
        await shell(guest, "(sleep 1; pkill -STOP -f osworld_guest.agent) >/dev/null 2>&1 & true")

        async def is_silent() -> bool:
            await guest.screenshot()
            return guest.is_silent

        await until(is_silent, "the agent's silence")
        before = await guest.screenshot()
        await guest.act([call("write", "By <QEMU> & Shift_1!\n"), call("moveTo", 50, 60)])
        await asyncio.sleep(1.0)
        assert Image.open(io.BytesIO(await guest.screenshot())).size == SCREEN
        assert await guest.screenshot() != before
        await guest.act([call("hotkey", "ctrl", "d")])


async def test_nothing_is_left_of_a_provider_that_was_closed() -> None:
    before, num_open = children(), len(os.listdir("/proc/self/fd"))
    async with desktops() as provider:
        first = await provider.start("replica-0")  # may have to save a state
        files = sorted(os.listdir(IMAGES))
        second = await provider.start("replica-1")
        await asyncio.gather(first.reset(), second.reset())
        assert len({first.machine.pid, second.machine.pid} - {None}) == 2
    assert children() == before
    assert sorted(os.listdir(IMAGES)) == files
    assert not [name for name in files if name.startswith(".") and (IMAGES / name).is_dir()]
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_a_foreign_image_is_never_written_to_and_gets_its_input_as_pyautogui(tmp_path: Path) -> None:
    """Our own disk in the place of the user's, with a guest server that knows OSWorld's protocol and no more."""
    base = await build_in_child(IMAGES)
    archive = IMAGES / "foreign-files.tar"
    archive.write_bytes(guest_archive())
    options = f"{KERNEL_OPTIONS} desktop.size=1024x768 desktop.protocol=osworld"
    source = ForeignImage(
        base.disk,
        memory_mb=768,
        boot=DirectBoot(kernel=base.kernel, initrd=base.initrd, command_line=options),
        files_archive=archive,
    )
    source.calm_s = OwnImage.calm_s  # known for this disk
    facts = base.disk.stat()
    async with desktops(source=source) as provider:
        desktop = await provider.start("replica-0")
        guest = desktop.guest
        assert not guest.is_silent
        assert provider.image_digest != "0" * 64
        assert Image.open(io.BytesIO(await guest.screenshot("jpeg"))).format == "PNG", "it knows no other"
        await guest.act([call("moveTo", 321, 123)])
        assert await guest.cursor_position() == (321, 123)
        await guest.upload("/home/user/left", b"x")
        await desktop.reset()
        assert await desktop.guest.file("/home/user/left") is None
    after = base.disk.stat()
    assert (after.st_mtime_ns, after.st_size) == (facts.st_mtime_ns, facts.st_size)
