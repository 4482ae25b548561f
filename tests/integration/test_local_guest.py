"""What the guest agent of a local desktop offers beyond clicks: pictures, recordings, unreadable files, a browser."""

import asyncio
import io
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from env_server.driving import browser
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.local.provider import LocalProvider
from osworld_pipeline.errors import SetupError

pytestmark = pytest.mark.desktop


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[GuestClient]:
    provider = LocalProvider(images=tmp_path, screen_size=(1023, 767), memory_mb=1536)
    try:
        yield (await provider.start("replica-0")).guest
    finally:
        await provider.close()


async def test_a_png_is_the_screen_to_the_last_pixel(guest: GuestClient) -> None:
    """Compares it with a screenshot of the same screen by another program."""
    await guest.launch(["xterm", "-e", "cat /usr/share/common-licenses/GPL-3; sleep 60"])
    await guest.activate_window("xterm", by_class=True)
    await asyncio.sleep(0.5)
    ours = Image.open(io.BytesIO(await guest.screenshot("png")))
    code = "from PIL import ImageGrab; ImageGrab.grab(xdisplay=':0').save('/tmp/other.png')"
    assert (await guest.run_python(code)).returncode == 0
    other = Image.open(io.BytesIO(await guest.file("/tmp/other.png") or b"")).convert("RGB")
    assert (ours.mode, ours.size) == ("RGB", (1023, 767))
    box = ImageChops.difference(ours, other).getbbox() or (0, 0, 0, 0)
    assert max(box[2] - box[0], box[3] - box[1]) < 40  # the mouse cursor, which only ours shows


async def test_lower_quality_makes_lossy_pictures_smaller_and_invalid_options_are_refused(guest: GuestClient) -> None:
    for image_format in ("jpeg", "webp"):
        sizes = [len(await guest.screenshot(image_format, quality=quality)) for quality in (10, 50, 100)]
        assert sizes == sorted(set(sizes)), image_format
    for query in ("format=gif", "format=jpeg&quality=0", "format=jpeg&quality=101", "format=jpeg&quality=x"):
        answer = await guest._http.get(f"/screenshot?{query}")
        assert answer.status_code == 400, query


async def test_a_recording_shows_what_happened(guest: GuestClient, tmp_path: Path) -> None:
    if shutil.which("ffmpeg") is None:
        pytest.skip("no ffmpeg here: a desktop records with the host's")
    with pytest.raises(SetupError, match="No recording in progress"):
        await guest.end_recording()
    await guest.start_recording()
    with pytest.raises(SetupError, match="already in progress"):
        await guest.start_recording()
    for x in range(100, 700, 60):
        await guest.act([GuestCall(name="moveTo", args=(x, 300)), GuestCall(name="sleep", args=(0.1,))])
    video = tmp_path / "video.mp4"
    video.write_bytes(await guest.end_recording())
    seconds, width, height = _probe(video)
    assert 0.7 < seconds < 5
    assert (width, height) == (1024, 768)  # even numbers, as video players require
    first, last = _frame(video, "0"), _frame(video, f"{seconds - 0.3:.2f}")
    assert first.size == last.size == (1024, 768)
    assert first.tobytes() != last.tobytes()


def _probe(video: Path) -> tuple[float, int, int]:
    argv = ["ffprobe", "-v", "error", "-show_entries", "format=duration:stream=width,height", "-of", "csv=p=0"]
    done = subprocess.run([*argv, str(video)], capture_output=True, text=True, check=True, timeout=30)
    size, duration = done.stdout.split()
    width, height = size.split(",")[:2]
    return float(duration), int(width), int(height)


def _frame(video: Path, at: str) -> Image.Image:
    argv = [
        "ffmpeg",
        "-v",
        "error",
        "-ss",
        at,
        "-i",
        str(video),
        "-frames:v",
        "1",
        "-f",
        "image2pipe",
        "-c:v",
        "png",
        "-",
    ]
    done = subprocess.run(argv, capture_output=True, check=True, timeout=30)
    return Image.open(io.BytesIO(done.stdout)).convert("RGB")


async def test_unreadable_files_and_folders_are_reported_without_a_fault(guest: GuestClient) -> None:
    assert await guest.file("/etc/shadow") is None
    assert await guest.list_directory("/root") is None
    assert await guest.file(f"/tmp/{'a' * 300}") is None
    assert await guest.file("/etc/passwd/x") is None
    assert await guest.file("/home/user/../../etc/hostname") == b"desktop\n"
    script = "cd ~/Desktop; mkdir closed; touch closed/a; chmod 0 closed; mkdir half; touch half/a; chmod 400 half; "
    script += "d=.; for i in $(seq 200); do d=$d/d; done; mkdir -p $d; mkfifo pipe; ln -s . loop"
    assert (await guest.run_bash_script(script)).returncode == 0
    tree = await guest.list_directory("/home/user/Desktop")
    assert tree is not None
    found = {child["name"]: child for child in tree["children"]}
    assert set(found) == {"closed", "half", "d", "pipe", "loop"}
    assert found["closed"]["children"] == []
    assert found["loop"]["type"] == "file"
    assert await guest.file("/home/user/Desktop/pipe") is None
    assert await guest.list_directory("/") is None  # more than any task grades
    assert await guest.platform() == "Linux"


async def test_a_guest_without_a_network_says_that_it_cannot_download(guest: GuestClient) -> None:
    for url in ("http://192.0.2.1/a", "file:///etc/passwd", "nonsense"):
        with pytest.raises(SetupError, match="/setup/download_file with 500"):
            await guest.download_file(url, "/tmp/a")
    assert await guest.file("/tmp/a") is None
    await guest.launch("cd /usr/share/common-licenses && exec python3 -m http.server 8000", shell=True)
    until = time.monotonic() + 10
    while True:
        try:
            await guest.download_file("http://127.0.0.1:8000/GPL-3", "~/new/GPL-3")
            break
        except SetupError:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
    assert b"GNU GENERAL PUBLIC LICENSE" in (await guest.file("~/new/GPL-3") or b"")


@pytest.mark.parametrize(
    "command",
    [
        "pyautogui.moveTo(300, 200, 0.1, pyautogui.easeInBounce)",
        "pyautogui.moveTo(300, 200, 0.1, pyautogui.easeInElastic); pyautogui.moveTo()",
        "pyautogui.dragTo(300, 200, duration=0.1, button='left', mouseDownUp=True)",
        "pyautogui.click(button='left', x=300, y=200, clicks=2)",
    ],
)
async def test_python_as_osworlds_controller_sends_it_runs(guest: GuestClient, command: str) -> None:
    prefix = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
    done = await guest.execute(["python", "-c", prefix + command])
    assert (done.returncode, done.error) == (0, "")
    assert await guest.cursor_position() == (300, 200)


@pytest.mark.browser
async def test_tabs_open_and_close_in_the_desktops_browser(guest: GuestClient) -> None:
    await guest.upload("/home/user/a.html", b"<title>Page A</title><h1>Hello from A</h1>")
    pages = ["file:///home/user/a.html", "data:text/html,<title>B</title>b"]
    await guest.launch(["google-chrome", "--remote-debugging-port=1337"])
    await browser.open_tabs(guest, pages)
    assert [tab["url"] for tab in await browser.list_tabs(guest)] == pages[::-1]
    assert [tab["url"] for tab in await browser.close_tabs(guest, pages[1:])] == pages[:1]
    until = time.monotonic() + 15
    while "Hello from A" not in await guest.accessibility():
        assert time.monotonic() < until
        await asyncio.sleep(0.1)
    assert await guest.file("/home/user/.config/google-chrome/Local State")
