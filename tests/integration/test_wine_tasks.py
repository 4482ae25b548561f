"""Real Windows programs on a local desktop, by Debian's Wine: notepad.exe and cmd.exe, drive C:, UTF-16 and CRLF; and
each family's oracle against its grader."""

import asyncio
import io
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from env_server.driving.download import Downloader
from env_server.driving.guest_driver import GuestDrivers
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.local.provider import LocalDesktop, LocalProvider
from env_server.settings import TaskLimits
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.evaluation.suites import SuiteTask, build_suite
from osworld_pipeline.task_schema.metrics.windows import windows_text

HAS_WINE = shutil.which("wine", path=f"{os.defpath}:/usr/games") is not None
pytestmark = [
    pytest.mark.desktop,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not HAS_WINE, reason="no Windows programs here: run `osworld-pipeline setup wine` (100 MB to download)"
    ),
]
IMAGES = Path(__file__).parents[2] / "var/test-images/wine"
"""Kept between runs: making drive C: takes a minute."""
SCREEN = (640, 400)
WAIT_LIMIT_S = 180.0
"""For a window: a busy machine takes long, and nothing here counts on its being quick."""
POLL_S = 0.25
STILL_S = 0.8
MAX_CARET_WIDTH = 10
"""Of the command prompt's, a letter wide."""
WRITE_LIMIT_S = 60.0
"""For a program to finish what it writes."""
SENDKEY = load_dialect("sendkey")


@pytest.fixture
async def desktop() -> AsyncIterator[LocalDesktop]:
    provider = LocalProvider(images=IMAGES, screen_size=SCREEN, wine=True)
    try:
        yield await provider.start("replica-0")
    finally:
        await provider.close()


async def until(question: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + WAIT_LIMIT_S
    while not await question():
        assert time.monotonic() < end, f"{what} did not happen within {WAIT_LIMIT_S:g} s"
        await asyncio.sleep(POLL_S)


def has_focus(guest: GuestClient, title: str) -> Callable[[], Awaitable[bool]]:
    """Whether that window is in front and fully drawn: before that, it receives no keys."""
    last, since = Image.new("RGB", SCREEN), time.monotonic()

    async def asked() -> bool:
        nonlocal last, since
        result = await guest.execute(["xdotool", "getactivewindow", "getwindowname"])
        shown = Image.open(io.BytesIO(await guest.screenshot())).convert("RGB")
        if not differs_by_a_caret(shown, last) or title.lower() not in result.output.lower():
            last, since = shown, time.monotonic()
        return time.monotonic() - since >= STILL_S

    return asked


def differs_by_a_caret(shown: Image.Image, last: Image.Image) -> bool:
    """Whether the screenshots are equal or differ only by a caret, which never stops blinking."""
    box = ImageChops.difference(shown, last).getbbox()
    return box is None or box[2] - box[0] <= MAX_CARET_WIDTH


def has_file(guest: GuestClient, path: str) -> Callable[[], Awaitable[bool]]:
    async def asked() -> bool:
        return bool(await guest.file(path))

    return asked


async def press(guest: GuestClient, *keys: str) -> None:
    await guest.act([GuestCall(name="hotkey" if len(keys) > 1 else "press", args=keys)])


async def write(guest: GuestClient, text: str) -> None:
    await guest.act([GuestCall(name="write", args=(text,))])


async def start(guest: GuestClient) -> None:
    for option in ("--stay", "--warm-up"):
        result = await guest.execute(["windows-program", option])
        assert (result.returncode, result.error) == (0, "")


async def run(guest: GuestClient, program: str, title: str) -> None:
    await press(guest, "win", "r")
    await until(has_focus(guest, "Run"), "the Run dialog")
    await write(guest, f"{program}\n")
    await until(has_focus(guest, title), program)


async def test_notepad_and_the_command_prompt_write_files_on_drive_c(desktop: LocalDesktop) -> None:
    guest = desktop.guest
    await start(guest)
    await run(guest, "notepad", "Notepad")
    await write(guest, "one\ntwo")
    await press(guest, "ctrl", "s")
    await until(has_focus(guest, "Save As"), "the dialog")
    await write(guest, "C:\\Output.txt\n")
    await until(has_file(guest, "C:\\output.txt"), "the note")
    assert await guest.file("c:/OUTPUT.txt") == b"one\r\ntwo", "in any letter case, with the line ends of Windows"
    await run(guest, "cmd", "cmd.exe")
    await write(guest, "cmd /u /c dir C:\\ > C:\\list.txt\n")
    await until(has_file(guest, "C:\\list.txt"), "the listing")
    listing = await guest.file("C:\\list.txt") or b""
    assert b"w\0i\0n\0d\0o\0w\0s\0" in listing, "UTF-16 without a mark"
    assert "Output.txt" in windows_text(listing)
    assert (await guest.list_directory("C:\\") or {})["type"] == "directory"
    await desktop.reset()
    assert await desktop.guest.file("C:\\output.txt") is None


WINDOW_OF = {"notepad\n": "Notepad", "cmd\n": "cmd.exe"}


async def play(guest: GuestClient, item: SuiteTask) -> None:
    """Plays the oracle through the dialect; each step waits until the window that it opens has the focus."""
    for step in item.oracle[:-1]:
        arguments = SENDKEY.parse_strict(SENDKEY.format(step.description, step.arguments)).arguments
        assert arguments is not None
        if arguments["action"] == "key":
            await press(guest, *arguments["keys"])
            opened = {"r": "Run", "s": "Save As"}[arguments["keys"][-1]]
            await until(has_focus(guest, opened), opened)
        else:
            await write(guest, arguments["text"])
            if arguments["text"] in WINDOW_OF:
                title = WINDOW_OF[arguments["text"]]
                await until(has_focus(guest, title), title)


def files_of(item: SuiteTask) -> Sequence[str]:
    results = item.task.config["evaluator"]["result"]
    return [one["path"] for one in (results if isinstance(results, list) else [results])]


@pytest.mark.parametrize(
    "families",
    [
        ("notepad_sentence", "cmd_listing", "cmd_product"),
        ("notepad_lines", "cmd_computer", "cmd_append"),
        ("cmd_echo", "cmd_numbers", "notepad_named"),
        ("note_in_folder", "two_notes"),
    ],
)
async def test_the_oracle_earns_one_and_an_untouched_desktop_earns_zero(
    desktop: LocalDesktop, tmp_path: Path, families: tuple[str, ...]
) -> None:
    limits = TaskLimits()
    drivers = GuestDrivers(limits=limits, downloader=Downloader(limits, folder=tmp_path), screen=SCREEN)
    suite = build_suite("wine_basics", seed=0, families=families, num_train=1, num_heldout=1, screen=SCREEN)
    try:
        for item in suite.heldout:
            driver = drivers.plan(item.task.config).drive(desktop)
            await driver.prepare()
            if item is suite.heldout[0]:
                assert await driver.evaluate(last_action="DONE") == 0.0
            await play(desktop.guest, item)
            for path in files_of(item):
                await until(has_file(desktop.guest, path), path)
            score, end = 0.0, time.monotonic() + WRITE_LIMIT_S
            while score < 1.0 and time.monotonic() < end:
                score = await driver.evaluate(last_action="DONE")
                await asyncio.sleep(POLL_S)
            assert score == 1.0, (item.task.task_id, {path: await desktop.guest.file(path) for path in files_of(item)})
            await desktop.reset()
    finally:
        await drivers.close()


async def test_desktop_without_wine_says_how_to_get_windows_programs(tmp_path: Path) -> None:
    provider = LocalProvider(images=tmp_path, screen_size=SCREEN)
    try:
        desktop = await provider.start("replica-0")
        result = await desktop.guest.execute(["windows-program", "--stay"])
        assert result.returncode == 1
        assert "start the env server with --wine" in result.error
    finally:
        await provider.close()
