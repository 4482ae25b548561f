"""The boot from power-on to a Windows desktop: the state machine, its commands to QEMU, and what it never reveals."""

import asyncio
import json
import os
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from env_server.foreign_input import Call
from env_server.guest_client import FileTooLargeError, GuestCall
from env_server.providers.qemu.bring_up import (
    BringUp,
    Stage,
    has_changed,
    is_answered,
    shows_mark,
    shows_something,
)
from env_server.providers.qemu.command import Attachments, Firmware, MachineSpec, qemu_arguments
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.file_channel import READY_ANSWER, FileChannel
from env_server.providers.qemu.qmp import QmpClient
from env_server.providers.qemu.qmp_input import QmpInput, plan_input
from env_server.providers.qemu.saved_state import state_digest
from env_server.providers.qemu.screen_view import Mark, changed_share, find_mark, is_blank
from env_server.providers.qemu.tools_disc import ensure_disc, windows_files
from env_server.providers.qemu.windows_guest import WindowsGuest
from env_server.providers.qemu.windows_image import START_TOOLS, WindowsImage, windows_stages
from osworld_pipeline.errors import ActionParseError, DependencyError, ReplicaError, SetupError

SIZE = (64, 48)
PASSWORD = "Correct-Horse7!"


def screen_of(text: str, *, colour: str = "navy") -> Image.Image:
    image = Image.new("RGB", SIZE, colour)
    ImageDraw.Draw(image).text((4, 4), text, fill="white")
    return image


def ppm(image: Image.Image) -> bytes:
    return b"P6\n%d %d\n255\n" % image.size + image.tobytes()


BLACK, BOOTING, LOCKED, PROMPT, DESKTOP = (
    Image.new("RGB", SIZE), screen_of("o.."), screen_of("12:00"), screen_of("pass", colour="teal"),
    screen_of("desk", colour="olive"),
)  # fmt: skip
WRONG = screen_of("wrong", colour="maroon")


class FakeWindows:
    """A computer that boots, asks for a password and starts a file server, seen from outside. Every look advances it by
    one step."""

    def __init__(self, *, accepts: str = PASSWORD, deaf_chords: int = 0, deaf_starts: int = 0) -> None:
        self.accepts, self.deaf_chords, self.deaf_starts = accepts, deaf_chords, deaf_starts
        self.coming: list[Image.Image] = [BLACK, BOOTING, BLACK]
        self.showing = BLACK
        self.later = LOCKED
        self.is_serving = False
        self.done: list[str] = []
        self.alive = True

    async def dump(self) -> bytes:
        self.showing = self.coming.pop(0) if self.coming else self.later
        return ppm(self.showing)

    async def perform(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.done.append(" ".join(map(str, (call.name, *call.args))))
            if call.args == ("ctrl", "alt", "delete"):
                self.deaf_chords -= 1
                self.later = self.later if self.deaf_chords >= 0 else PROMPT
            elif call.name == "write" and self.later is PROMPT:
                self.later = DESKTOP if call.args[0] == self.accepts else WRONG
            elif call.name == "write" and START_TOOLS in call.args[0] and self.later is DESKTOP:
                self.deaf_starts -= 1
                self.is_serving = self.deaf_starts < 0

    async def answers(self) -> bool:
        return self.is_serving


def quick(stages: Sequence[Stage], *, limit_s: float = 0.3) -> list[Stage]:
    """The same stages with waits as short as the fake needs."""
    return [
        Stage(
            name=stage.name,
            do=stage.do,
            limit_s=limit_s,
            num_tries=stage.num_tries,
            until=shows_something(still_s=0.02)
            if "shows something" in stage.until.words
            else has_changed(still_s=0.02)
            if "other screen" in stage.until.words
            else stage.until,
        )
        for stage in stages
    ]


def stages_of(windows: FakeWindows, password: str = PASSWORD) -> list[Stage]:
    channel = FileChannel("/nowhere", name="replica-0")
    channel.is_ready = windows.answers  # type: ignore[method-assign]
    return quick(windows_stages(password, channel))


def way_of(windows: FakeWindows, folder: Path) -> BringUp:
    return BringUp(
        "the machine", eyes=windows, hands=windows, is_alive=lambda: windows.alive, folder=folder, poll_s=0.005
    )


async def test_every_stage_is_done_once_on_a_computer_that_receives_every_key(tmp_path: Path) -> None:
    windows = FakeWindows()
    done = await way_of(windows, tmp_path).run(stages_of(windows))
    assert [stage.stage for stage in done] == [
        *("the start", "the password prompt", "the login", "the file server", "the desktop"),
    ]
    assert [stage.num_tries for stage in done] == [1, 1, 1, 1, 1]
    assert windows.done[0] == "hotkey ctrl alt delete"
    assert windows.done[1:3] == [f"write {PASSWORD}", "press enter"]
    assert not os.listdir(tmp_path), "nothing failed, so nothing is kept"


async def test_keys_that_were_not_received_are_pressed_again(tmp_path: Path) -> None:
    windows = FakeWindows(deaf_chords=2, deaf_starts=1)
    done = await way_of(windows, tmp_path).run(stages_of(windows))
    assert {stage.stage: stage.num_tries for stage in done}["the password prompt"] == 3
    assert {stage.stage: stage.num_tries for stage in done}["the file server"] == 2
    assert windows.done.count("hotkey ctrl alt delete") == 3


async def test_wrong_password_is_reported_with_a_screenshot_and_without_the_password(tmp_path: Path) -> None:
    windows = FakeWindows(accepts="another")
    with pytest.raises(ReplicaError) as caught:
        await way_of(windows, tmp_path).run(stages_of(windows))
    said = str(caught.value)
    assert "did not get past the file server" in said
    assert "each of 4 tries" in said
    assert PASSWORD not in said
    assert PASSWORD not in repr(stages_of(windows))
    (path,) = (tmp_path / "failed-boots").iterdir()
    assert str(path) in said
    assert changed_share(Image.open(path).convert("RGB"), WRONG) == 0.0


async def test_machine_that_never_shows_anything_fails_at_its_first_stage_within_the_limit(tmp_path: Path) -> None:
    windows = FakeWindows()
    windows.later = BLACK
    async with asyncio.timeout(5):
        with pytest.raises(
            ReplicaError, match=r"did not get past the start: within 0\.3 s there was no screen that shows"
        ):
            await way_of(windows, tmp_path).run(stages_of(windows))
    assert windows.done == []


async def test_machine_that_ends_is_reported_at_once(tmp_path: Path) -> None:
    windows = FakeWindows()
    windows.alive = False
    with pytest.raises(ReplicaError, match="the machine ended before the start"):
        await way_of(windows, tmp_path).run(stages_of(windows))


async def test_failure_is_reported_even_if_its_folder_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "failed-boots").write_text("in the way")
    windows = FakeWindows()
    windows.later = BLACK
    with pytest.raises(ReplicaError, match=r"did not get past the start.*its screen is not available"):
        await way_of(windows, tmp_path).run(stages_of(windows))


async def test_screen_counts_as_still_with_a_blinking_caret_but_not_with_a_spinner(tmp_path: Path) -> None:
    caret = PROMPT.copy()
    caret.putpixel((30, 30), (255, 255, 255))
    frames = {True: [PROMPT, caret], False: [BOOTING, LOCKED]}

    class Blinking(FakeWindows):
        num_looks = 0
        is_caret = True

        async def dump(self) -> bytes:
            self.num_looks += 1
            return ppm(frames[self.is_caret][self.num_looks % 2])

    stage = Stage(name="the start", until=shows_something(still_s=0.05), limit_s=0.2)
    assert await way_of(Blinking(), tmp_path).run([stage])
    spinning = Blinking()
    spinning.is_caret = False
    with pytest.raises(ReplicaError, match="did not get past the start"):
        await way_of(spinning, tmp_path).run([stage])


async def test_mark_distinguishes_the_prompt_from_any_other_changed_screen(tmp_path: Path) -> None:
    mark = Mark("prompt", PROMPT.crop((3, 3, 20, 14)))
    windows = FakeWindows()
    stages = [
        Stage(name="the start", until=shows_something(still_s=0.02), limit_s=1),
        Stage(name="the prompt", do=(GuestCall(name="hotkey", args=("ctrl", "alt", "delete")),),
              until=shows_mark(mark), limit_s=1),
    ]  # fmt: skip
    assert await way_of(windows, tmp_path).run(stages)
    nowhere = shows_mark(Mark("nowhere", WRONG.crop((3, 3, 20, 14))))
    with pytest.raises(ReplicaError, match="there was no mark 'nowhere'"):
        await way_of(windows, tmp_path).run([Stage(name="the prompt", until=nowhere, limit_s=0.05)])


async def test_stage_waits_for_an_answer_that_comes_late(tmp_path: Path) -> None:
    answers = iter([False, False, True])

    async def ask() -> bool:
        return next(answers)

    (done,) = await way_of(FakeWindows(), tmp_path).run(
        [Stage(name="the server", until=is_answered("it", ask), limit_s=5)]
    )
    assert done.num_tries == 1


# What can be seen on a screen


def test_screen_with_at_most_a_caret_is_blank_regardless_of_its_size() -> None:
    large = Image.new("RGB", (1280, 800))
    assert len(ppm(large)) > 500_000
    assert is_blank(large)
    large.putpixel((5, 5), (255, 255, 255))
    assert is_blank(large)
    assert not is_blank(screen_of("text"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, SIZE[0] - 9), st.integers(0, SIZE[1] - 7), st.integers(0, 2**32))
def test_mark_is_found_exactly_where_it_was_cut(left: int, top: int, seed: int) -> None:
    draw = random.Random(seed)
    screen = Image.frombytes("RGB", SIZE, draw.randbytes(SIZE[0] * SIZE[1] * 3))
    assert find_mark(screen, screen.crop((left, top, left + 9, top + 7))) == (left, top)
    other = Image.frombytes("RGB", (9, 7), draw.randbytes(9 * 7 * 3))
    assert find_mark(screen, other) is None


def test_mark_is_found_neither_across_an_edge_nor_in_a_smaller_screen() -> None:
    screen = Image.new("RGB", (4, 3), "black")
    screen.putpixel((3, 0), (9, 9, 9))
    screen.putpixel((0, 1), (9, 9, 9))
    assert find_mark(screen, Image.new("RGB", (2, 1), (9, 9, 9))) is None
    assert find_mark(screen, Image.new("RGB", (5, 1))) is None


# Commands to QEMU


class RecordingQemu:
    """Answers every order and writes it down."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.orders: list[tuple[str, Any]] = []
        self.client: QmpClient | None = None

    async def serve(self) -> None:
        loop, pending = asyncio.get_running_loop(), b""
        await loop.sock_sendall(self._socket, b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
        while data := await loop.sock_recv(self._socket, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                self.orders.append((order["execute"], order.get("arguments")))
                await loop.sock_sendall(self._socket, json.dumps({"return": {}, "id": order["id"]}).encode() + b"\n")

    def keys(self) -> list[str]:
        """+a where a key goes down, -a where it goes up."""
        sent = [arguments["events"] for name, arguments in self.orders if name == "input-send-event"]
        return keys_in([event for events in sent for event in events])


def keys_in(events: Sequence[Any]) -> list[str]:
    keys = [event["data"] for event in events if event["type"] == "key"]
    return [("+" if key["down"] else "-") + key["key"]["data"] for key in keys]


@asynccontextmanager
async def recording() -> AsyncIterator[tuple[RecordingQemu, QmpInput]]:
    ours, theirs = socket.socketpair()
    with theirs:
        qemu = RecordingQemu(theirs)
        server = asyncio.create_task(qemu.serve())
        client = QmpClient(ours, name="replica-7")
        try:
            await client.open()
            qemu.client = client
            yield qemu, QmpInput(client, screen_size=(1280, 800))
        finally:
            await client.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


def typed(keys: Sequence[str]) -> str:
    """What a US keyboard would have written."""
    plain = {"spc": " ", "ret": "\n", "minus": "-", "backslash": "\\", "dot": ".", "slash": "/", "semicolon": ";"}
    shifted = {"1": "!", "5": "%", "9": "(", "0": ")", "semicolon": ":"}
    written, is_shifted = "", False
    for key in keys:
        down, name = key[0] == "+", key[1:]
        if name == "shift":
            is_shifted = down
        elif down:
            character = plain.get(name, name)
            written += (shifted.get(name) or character.upper()) if is_shifted else character
    return written


async def test_login_uses_only_keys_and_no_other_monitor_command() -> None:
    async with recording() as (qemu, keys):
        for stage in windows_stages(PASSWORD, FileChannel("/nowhere", name="r"))[:3]:
            await keys.perform(stage.do)
        pressed = qemu.keys()
    assert pressed[:6] == ["+ctrl", "+alt", "+delete", "-delete", "-alt", "-ctrl"]
    assert typed(pressed[6:]) == f"{PASSWORD}\n"
    assert {name for name, _ in qemu.orders} == {"qmp_capabilities", "input-send-event"}


def test_file_server_is_started_by_the_run_dialog() -> None:
    stage = windows_stages(PASSWORD, FileChannel("/nowhere", name="r"))[3]
    moments = plan_input(stage.do, screen_size=(1280, 800), start=(0, 0))
    pressed = keys_in([event for moment in moments for event in moment.events])
    assert pressed[:6] == ["+esc", "-esc", "+meta_l", "+r", "-r", "-meta_l"]
    assert typed(pressed[6:]) == f"{START_TOOLS}\n"
    assert len(START_TOOLS) < 260, "the Run dialog takes no more"


async def test_clicks_use_absolute_tablet_positions() -> None:
    async with recording() as (qemu, keys):
        await keys.perform([GuestCall(name="click", args=(1279, 0))])
    moved, *buttons = [arguments["events"] for name, arguments in qemu.orders if name == "input-send-event"]
    assert [event["data"] for event in moved] == [{"axis": "x", "value": 0x7FFF}, {"axis": "y", "value": 0}]
    assert [event["data"]["down"] for (event,) in buttons] == [True, False]


async def test_long_text_goes_key_by_key_and_one_that_takes_too_long_is_refused_whole() -> None:
    async with recording() as (qemu, keys):
        with pytest.raises(
            ActionParseError, match="would take 160 s on emulated keys, the limit is 60 s; type it in parts"
        ):
            await keys.perform([GuestCall(name="write", args=("a" * 4000,))], limit_s=60.0)
        assert qemu.keys() == []
        await keys.perform([GuestCall(name="write", args=("ab" * 20,))], limit_s=60.0)
        assert typed(qemu.keys()) == "ab" * 20
        assert all(len(arguments["events"]) == 1 for name, arguments in qemu.orders if name == "input-send-event")


@pytest.mark.parametrize("key", ["ret\nquit", "a; quit", "ret 100", "system_reset", ""])
async def test_only_valid_key_names_reach_qemu(key: str) -> None:
    async with recording() as (qemu, keys):
        with pytest.raises(ActionParseError):
            await keys.perform([GuestCall(name="press", args=(key,))])
        assert [name for name, _ in qemu.orders] == ["qmp_capabilities"]


# The machine, its disc and its files

PLAIN = MachineSpec(
    screen_size=(1280, 800),
    memory_mb=4096,
    num_cpus=2,
    accelerator="kvm",
    disks=(Path("/images/windows.qcow2"),),
    firmware=Firmware(code=Path("/fw/code.fd"), variables=Path("/fw/vars.fd")),
    files_archive=Path("/images/tools.iso"),
    hardware="plain",
    guest_port=9999,
)
ATTACHED = Attachments(memory_fd=10, overlay_fd=11, qmp_fd=12, wake_fd=13, shares_ram=False, variables_fd=14)


def test_windows_finds_hardware_that_it_has_drivers_for() -> None:
    words = qemu_arguments(PLAIN, ATTACHED)
    line = " ".join(words)
    assert "virtio" not in line
    for piece in (
        "ide-hd,bus=ide.0,drive=disk",
        "ide-cd,bus=ide.1,drive=files",
        "usb-tablet",
        "e1000",
        "base=localtime",
    ):
        assert piece in line
    assert "pflash0=code,pflash1=variables" in line
    assert "hostfwd=tcp:127.0.0.1:9999-:9999" in line
    assert "hv_time" in line
    overlay = next(json.loads(word) for word in words if word.startswith('{"driver": "qcow2"'))
    assert overlay["backing"]["read-only"] is True, "the image itself is never written to"


def test_state_of_other_hardware_is_another_state() -> None:
    def digest(spec: MachineSpec) -> str:
        return state_digest(spec, image_digest="a", qemu="7", host_cpu="")

    assert digest(PLAIN) != digest(MachineSpec(**{**PLAIN.__dict__, "hardware": "virtual"}))


def test_disc_holds_the_tools_with_windows_line_ends_and_is_made_once(tmp_path: Path) -> None:
    files = windows_files()
    assert set(files) == {"start.cmd", "files.ps1"}
    assert all(data.count(b"\n") == data.count(b"\r\n") > 5 for data in files.values())
    disc = ensure_disc(tmp_path, files)
    data = disc.read_bytes()
    assert all(content in data for content in files.values())
    made_at = disc.stat().st_mtime_ns
    assert ensure_disc(tmp_path, files) == disc
    assert disc.stat().st_mtime_ns == made_at
    assert ensure_disc(tmp_path, {"a": b"x"}) != disc
    (tmp_path / ".tools-killed").mkdir()
    ensure_disc(tmp_path, {"b": b"x"})
    left = {path.suffix for path in tmp_path.iterdir() if path.name != ".tools.lock"}
    assert left == {".iso"}, "no folder to work in is left, nor a killed maker's"


def test_file_server_runs_as_a_task_of_the_system_and_not_in_a_window() -> None:
    started = windows_files()["start.cmd"].decode()
    assert re.search(r"schtasks /create .*/ru SYSTEM .*/sc onstart", started)
    assert "if exist" in START_TOOLS
    assert READY_ANSWER.decode().strip() in windows_files()["files.ps1"].decode()


Handler = Callable[[httpx.Request], httpx.Response]


def channel_of(handler: Handler) -> FileChannel:
    http = httpx.AsyncClient(base_url="http://guest", transport=httpx.MockTransport(handler))
    return FileChannel("/nowhere", name="replica-0", http=http)


async def test_file_is_requested_by_its_windows_path() -> None:
    asked: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(200, content=b"\xff\xfeh\x00i\x00")

    channel = channel_of(handler)
    assert await channel.read("C:\\My Files\\a#b%.txt", timeout_s=5) == b"\xff\xfeh\x00i\x00"
    assert asked == [b"/C%3A/My%20Files/a%23b%25.txt"]


@pytest.mark.parametrize("status", [403, 404])
async def test_missing_file_is_none(status: int) -> None:
    assert await channel_of(lambda _: httpx.Response(status)).read("C:\\a", timeout_s=5) is None


async def test_server_that_fails_or_is_gone_is_a_fault_and_not_a_missing_file() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ReplicaError, match=r"answered C:.a with 500"):
        await channel_of(lambda _: httpx.Response(500)).read("C:\\a", timeout_s=5)
    with pytest.raises(ReplicaError, match="cannot be reached"):
        await channel_of(gone).read("C:\\a", timeout_s=5)
    assert not await channel_of(gone).is_ready()
    assert not await channel_of(lambda _: httpx.Response(200, content=b"somebody else")).is_ready()
    assert await channel_of(lambda _: httpx.Response(200, content=READY_ANSWER)).is_ready()
    with pytest.raises(FileTooLargeError, match="larger than 10 bytes"):
        await channel_of(lambda _: httpx.Response(200, content=b"x" * 11)).read("C:\\a", max_bytes=10, timeout_s=5)


async def test_guest_has_files_and_keys_and_refuses_what_needs_a_program_inside() -> None:
    async with recording() as (qemu, keys):
        assert qemu.client is not None
        display = Display(qemu.client, name="replica-0")
        channel = channel_of(lambda request: httpx.Response(200, content=READY_ANSWER))
        guest = WindowsGuest(channel, "/nowhere", name="replica-0", display=display, keys=keys)
        assert await guest.platform() == "Windows"
        assert await guest.file("C:\\a") == READY_ANSWER
        await guest.act([GuestCall(name="write", args=("a",))])
        assert qemu.keys() == ["+a", "-a"]
        assert (await guest.accessibility(), await guest.terminal()) == ("", None)
        for refused in (guest.execute(["dir"]), guest.launch("notepad"), guest.upload("C:\\a", b"x")):
            with pytest.raises(SetupError, match="it has no guest server"):
                await refused
        await guest.close()


# What an image needs


def an_image(folder: Path) -> Path:
    path = folder / "windows.qcow2"
    path.write_bytes(b"QFI\xfb" + b"\0" * 100)
    return path


@pytest.mark.parametrize("password", [None, ""])
def test_the_error_for_an_image_without_a_password_names_the_variable(tmp_path: Path, password: str | None) -> None:
    with pytest.raises(DependencyError, match="set WINDOWS_ADMIN_PASSWORD"):
        WindowsImage(an_image(tmp_path), password=password)


def test_password_that_cannot_be_typed_is_refused_without_being_printed(tmp_path: Path) -> None:
    with pytest.raises(DependencyError) as caught:
        WindowsImage(an_image(tmp_path), password="geh€im")
    assert "WINDOWS_ADMIN_PASSWORD has a character that no key" in str(caught.value)
    assert "€" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__


def test_mark_that_is_not_a_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="is not an image"):
        WindowsImage(an_image(tmp_path), password=PASSWORD, login_mark=an_image(tmp_path))
