"""Live screens: frames only when something changes, one stream of a desktop for all watchers, none without a watcher,
and checks of everything that a guest sends."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from PIL import Image

from env_server.api import live
from env_server.api.live import LiveScreens
from env_server.driving.pyautogui_calls import action_points
from env_server.guest import frames
from env_server.guest.frames import Frames
from env_server.guest_client import MAX_FRAME_BYTES, GuestClient, NoFramesError
from osworld_pipeline.errors import NoCapacityError, ReplicaError

JPEG = b"\xff\xd8\xff picture"


class Screen:
    """A framebuffer whose first pixel is set by the test; BGRX, with padding at the end of each line."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height, self.stride = width, height, width * 4 + 8
        self.shade = 0

    def new_pixels(self, seen: bytes) -> bytes | None:
        line = bytes((self.shade, 100, 200, 0)) * self.width + bytes(8)
        return None if line * self.height == seen else line * self.height


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def picture_of(record: bytes) -> Image.Image:
    assert int.from_bytes(record[:4], "big") == len(record) - 4
    return Image.open(io.BytesIO(record[4:]))


@pytest.mark.parametrize(("width", "size"), [(480, (480, 270)), (1000, (960, 540)), (1920, (1920, 1080))])
def test_a_frame_has_the_screens_colours_at_the_size_asked_for(width: int, size: tuple[int, int]) -> None:
    screen = Screen(1920, 1080)
    screen.shade = 30
    picture = picture_of(next(Frames(screen).stream(width, 0.5)))
    assert picture.size == size
    assert all(abs(one - other) < 8 for one, other in zip(picture.getpixel((50, 50)), (200, 100, 30), strict=True))  # pyright: ignore[reportArgumentType]


def test_the_stream_of_an_unchanged_screen_sends_only_heartbeats_and_ends() -> None:
    screen, clock = Screen(64, 64), Clock()
    records = list(Frames(screen, clock=clock, sleep=clock.sleep).stream(64, 0.5))
    assert records[0] != bytes(4)
    assert set(records[1:]) == {bytes(4)}
    assert len(records) - 1 == pytest.approx(frames.STREAM_S / frames.HEARTBEAT_S, abs=2)


def test_each_look_at_a_changed_screen_is_a_frame() -> None:
    screen, clock = Screen(64, 64), Clock()
    stream = Frames(screen, clock=clock, sleep=clock.sleep).stream(64, 0.5)
    shades = []
    for shade in (10, 120, 240):
        screen.shade = shade
        shades.append(picture_of(next(stream)).getpixel((9, 9))[2])  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]
    assert shades == pytest.approx([10, 120, 240], abs=8)
    assert clock.now == 1.0


def test_the_number_of_streams_of_a_desktop_is_limited_and_an_ended_one_makes_room() -> None:
    source = Frames(Screen(64, 64))
    for _ in range(frames.MAX_STREAMS):
        source.stream(64, 0.5).close()  # as when the client is gone before the first record
    streams = [source.stream(64, 0.5) for _ in range(frames.MAX_STREAMS)]
    for stream in streams:
        next(stream)
    with pytest.raises(ValueError, match="streams of frames are open already"):
        source.stream(64, 0.5)
    streams[0].close()
    next(source.stream(64, 0.5))


@pytest.mark.parametrize(("width", "interval_s"), [(63, 0.5), (1921, 0.5), (480, 0.01), (480, float("nan"))])
def test_a_stream_with_an_invalid_width_or_interval_is_refused(width: int, interval_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Frames(Screen(64, 64)).stream(width, interval_s)


def record(picture: bytes) -> bytes:
    return len(picture).to_bytes(4, "big") + picture


def guest(answer: Callable[[httpx.Request], httpx.Response]) -> GuestClient:
    http = httpx.AsyncClient(base_url="http://guest", transport=httpx.MockTransport(answer))
    return GuestClient(http, name="r")


def sent(*parts: bytes) -> Callable[[httpx.Request], httpx.Response]:
    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return lambda _: httpx.Response(200, content=stream())


async def frames_of(client: GuestClient) -> list[bytes]:
    return [picture async for picture in client.frames(width=480, interval_s=0.5)]


async def test_frames_are_read_from_bytes_that_arrive_in_any_pieces() -> None:
    whole = record(JPEG) + record(b"") + record(JPEG + b"2")
    assert await frames_of(guest(sent(whole))) == [JPEG, JPEG + b"2"]
    assert await frames_of(guest(sent(*(whole[at : at + 1] for at in range(len(whole)))))) == [JPEG, JPEG + b"2"]


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (lambda _: httpx.Response(404), NoFramesError, "has no frames"),
        (lambda _: httpx.Response(503), ReplicaError, "answered /frames with 503"),
        (sent(record(b"<svg/>")), ReplicaError, "no JPEG"),
        (sent((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"x"), ReplicaError, "a frame of"),
    ],
)
async def test_a_guest_that_sends_something_else_is_refused(answer: Any, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        await frames_of(guest(answer))


async def test_the_error_for_a_guest_that_is_gone_names_the_guest() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no socket")

    with pytest.raises(ReplicaError, match="of r cannot be reached for /frames"):
        await frames_of(guest(gone))


class Guest:
    """Sends what the test puts into its queue; an exception is raised."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[bytes | Exception]()
        self.num_streams = 0

    async def frames(self, *, width: int, interval_s: float) -> AsyncIterator[bytes]:
        self.num_streams += 1
        try:
            while True:
                found = await self.queue.get()
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            self.num_streams -= 1


def pool_of(*guests: Guest) -> Any:
    replicas = [
        SimpleNamespace(replica_id=f"r{index}", desktop=SimpleNamespace(guest=one)) for index, one in enumerate(guests)
    ]
    return SimpleNamespace(replicas=replicas, is_ending=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(live, "RETRY_S", 0.01)


def parsed(found: bytes) -> tuple[str, bytes]:
    start = 4 + int.from_bytes(found[:4], "big")
    head = orjson.loads(found[4:start])
    assert head["size"] == len(found) - start
    return head["replica"], found[start:]


async def test_all_watchers_of_a_replica_share_one_stream() -> None:
    one, other = Guest(), Guest()
    screens = LiveScreens(pool_of(one, other))
    first, second = screens.stream(["r0", "r1", "unknown"], 480), screens.stream(["r0"], 480)
    reads = [asyncio.ensure_future(anext(stream)) for stream in (first, second)]
    await asyncio.sleep(0.05)
    assert (one.num_streams, other.num_streams) == (1, 1)
    one.queue.put_nowait(JPEG)
    assert [parsed(await read) for read in reads] == [("r0", JPEG)] * 2
    other.queue.put_nowait(JPEG + b"2")
    assert parsed(await anext(first)) == ("r1", JPEG + b"2")
    await first.aclose()
    await asyncio.sleep(0.02)
    assert (one.num_streams, other.num_streams) == (1, 0), "the other has no watcher"
    await second.aclose()
    await asyncio.sleep(0.02)
    assert one.num_streams == 0


async def test_a_later_watcher_gets_the_current_frame_at_once() -> None:
    one = Guest()
    screens = LiveScreens(pool_of(one))
    first = screens.stream(["r0"], 480)
    one.queue.put_nowait(JPEG)
    await anext(first)
    second = screens.stream(["r0"], 480)
    async with asyncio.timeout(1):
        assert parsed(await anext(second)) == ("r0", JPEG)
    await first.aclose()
    await second.aclose()


async def test_a_desktop_that_is_reset_is_followed_again() -> None:
    one = Guest()
    stream = LiveScreens(pool_of(one)).stream(["r0"], 480)
    for found in (JPEG, ReplicaError("it is being reset"), JPEG + b"2"):
        one.queue.put_nowait(found)
    async with asyncio.timeout(2):
        pictures = [parsed(await anext(stream))[1]]
        if pictures[-1] == JPEG:
            pictures.append(parsed(await anext(stream))[1])
    assert pictures[-1] == JPEG + b"2"
    await stream.aclose()


async def test_a_guest_without_frames_is_asked_once() -> None:
    one = Guest()
    screens = LiveScreens(pool_of(one))
    one.queue.put_nowait(NoFramesError("none"))
    one.queue.put_nowait(JPEG)
    stream = screens.stream(["r0"], 480)
    read = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.1)
    assert (read.done(), one.queue.qsize()) == (False, 1)
    read.cancel()


async def test_streams_end_with_the_server_and_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(Guest())
    screens = LiveScreens(pool)
    reading = asyncio.ensure_future(anext(screens.stream(["r0"], 480), None))
    await asyncio.sleep(0.05)
    pool.is_ending = True
    assert await asyncio.wait_for(reading, 1) is None
    pool.is_ending = False
    monkeypatch.setattr(live, "STREAM_S", 0.1)
    assert await asyncio.wait_for(anext(screens.stream(["r0"], 480), None), 1) is None


async def test_the_number_of_streams_is_limited() -> None:
    screens = LiveScreens(pool_of(Guest()))
    streams = [screens.stream(["r0"], 480) for _ in range(live.MAX_STREAMS)]
    reads = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
    await asyncio.sleep(0.05)
    with pytest.raises(NoCapacityError, match="pages are watching already"):
        screens.need_room()
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    screens.need_room()


@pytest.mark.parametrize(
    ("action", "points"),
    [
        ("pyautogui.click(320, 120)", ((320.0, 120.0),)),
        ("pyautogui.moveTo(x=1, y=2); pyautogui.dragTo(3, 4.5)", ((1.0, 2.0), (3.0, 4.5))),
        ("pyautogui.scroll(-3, 10, 20)", ((10.0, 20.0),)),
        ("pyautogui.click()", ()),
        ("pyautogui.move(5, 6)", ()),
        ("pyautogui.write('x')", ()),
        ("DONE", ()),
        ("import os; os.remove('a')", ()),
        ("", ()),
    ],
)
def test_the_positions_of_an_action_are_those_on_the_screen(action: str, points: tuple) -> None:
    assert action_points(action) == points
