"""When a screen counts as settled, with looks at raw screen bytes every 20 ms, and with screenshots."""

import asyncio
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from env_server.driving.settle import settle_by_looks
from env_server.guest.processes import descendants, is_at_work
from env_server.guest.settling import read_limit_s, wait_until_still
from env_server.guest.stillness import Stillness, num_changed_cells
from osworld_pipeline.errors import ReplicaError

WIDTH, HEIGHT = 160, 100
BLANK = bytes(4 * WIDTH * HEIGHT)
ScreenAt = Callable[[float], bytes]


def filled(left: int, top: int, width: int, height: int, *, on: bytes = BLANK, shade: int = 255) -> bytes:
    screen = bytearray(on)
    for y in range(top, top + height):
        screen[4 * (y * WIDTH + left) : 4 * (y * WIDTH + left + width)] = bytes([shade]) * (4 * width)
    return bytes(screen)


WINDOW = filled(10, 10, 120, 60)


def with_caret(screen: bytes, at_s: float) -> bytes:
    return filled(150, 80, 2, 16, on=screen) if int(at_s / 0.5) % 2 else screen


def settled_at(screen_at: ScreenAt, *, limit_s: float, busy_until_s: float = 0.0) -> float | None:
    """The time at which the screen settles, or None if the limit comes first."""
    stillness = Stillness(screen_at(-1.0), width=WIDTH, limit_s=limit_s)
    for number in range(int(limit_s / 0.02)):
        at_s = 0.02 * number
        if stillness.look(screen_at(at_s), at_s, is_busy=at_s < busy_until_s):
            return at_s
    return None


def appears(at_s: float) -> ScreenAt:
    return lambda now_s: WINDOW if now_s >= at_s else BLANK


def test_screen_that_changed_at_once_settles_after_a_third_of_the_limit() -> None:
    assert settled_at(appears(0.0), limit_s=0.3) == pytest.approx(0.1, abs=0.03)
    assert settled_at(appears(0.0), limit_s=1.2) == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("late_s", [0.1, 0.25, 0.4])
def test_late_window_is_waited_for(late_s: float) -> None:
    assert settled_at(appears(late_s), limit_s=1.2) == pytest.approx(late_s + 0.4, abs=0.03)


def test_unchanged_screen_does_not_count_as_settled_before_a_program_could_have_reacted() -> None:
    assert settled_at(lambda _: BLANK, limit_s=0.9) == pytest.approx(0.5, abs=0.03)
    assert settled_at(lambda _: BLANK, limit_s=2.0) == pytest.approx(1.0, abs=0.03)
    assert settled_at(lambda _: BLANK, limit_s=0.3) is None


def test_caret_counts_neither_as_movement_nor_as_reaction() -> None:
    assert settled_at(lambda at_s: with_caret(appears(0.1)(at_s), at_s), limit_s=1.8) == pytest.approx(0.7, abs=0.03)
    assert settled_at(lambda at_s: with_caret(BLANK, at_s), limit_s=1.2) == pytest.approx(0.6, abs=0.03)


def test_clock_whose_digits_always_differ_does_not_count_as_movement() -> None:
    def clock(at_s: float) -> bytes:
        return filled(80, 84, 64, 12, on=appears(0.0)(at_s), shade=int(at_s / 0.1) % 256)

    assert settled_at(clock, limit_s=1.2) == pytest.approx(0.4, abs=0.03)


def test_animated_screen_does_not_settle_before_the_limit() -> None:
    assert settled_at(lambda at_s: filled(int(at_s * 50) % 60, 0, 90, 90), limit_s=1.2) is None


def test_text_that_comes_letter_by_letter_is_movement() -> None:
    def typed(at_s: float) -> bytes:
        return filled(0, 40, 8 * min(20, int(max(0.0, at_s) / 0.03)), 64)

    last_s = 20 * 0.03
    assert last_s < (settled_at(typed, limit_s=1.2) or 0.0) < last_s + 0.45


def test_programs_at_work_put_the_verdict_off() -> None:
    assert settled_at(appears(0.0), limit_s=1.2, busy_until_s=0.5) == pytest.approx(0.88, abs=0.03)


def test_screen_of_another_size_is_movement() -> None:
    assert settled_at(lambda at_s: BLANK if at_s < 0 else BLANK * 2, limit_s=0.3) == pytest.approx(0.1, abs=0.03)


@given(place=st.integers(0, len(BLANK) - 1), value=st.integers(1, 255))
def test_one_changed_byte_is_one_changed_cell_at_any_place(place: int, value: int) -> None:
    changed = BLANK[:place] + bytes([value]) + BLANK[place + 1 :]
    assert num_changed_cells(BLANK, changed, width=WIDTH) == 1


def test_cells_are_counted_where_changes_are_far_apart() -> None:
    corners = filled(0, 0, 8, 8, on=filled(152, 90, 8, 4))
    assert num_changed_cells(BLANK, corners, width=WIDTH) == 2
    assert num_changed_cells(BLANK, filled(0, 0, WIDTH, HEIGHT), width=WIDTH) == 20 * 13


@pytest.mark.parametrize("value", ["1", -0.1, 61, True, None, float("nan")])
def test_limit_that_is_not_a_number_of_seconds_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="settle_s must be"):
        read_limit_s(value)


def test_slow_looks_do_not_prolong_the_wait() -> None:
    num_looks = 0

    def slow() -> bytes:
        nonlocal num_looks
        num_looks += 1
        time.sleep(0.2)
        return BLANK

    assert wait_until_still(slow, BLANK, width=WIDTH, limit_s=0.5) == 0.5
    assert num_looks == 1, "a second would end after the limit"


SPIN = "import threading, time\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"


@pytest.mark.parametrize(("code", "expected"), [("import time\n", False), (SPIN, True)])
def test_program_counts_as_busy_if_any_of_its_threads_is_busy(code: str, expected: bool) -> None:
    program = subprocess.Popen(
        [sys.executable, "-ISc", code + "print(flush=True); time.sleep(30)"], stdout=subprocess.PIPE
    )
    try:
        assert program.stdout is not None
        program.stdout.readline()
        time.sleep(0.05)
        assert program.pid in descendants(os.getpid())
        looks = []
        for _ in range(50):
            time.sleep(0.002)
            looks.append(is_at_work(program.pid))
        assert (sum(looks) > 25) is expected
    finally:
        program.kill()
        program.communicate()


def png(screen: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGBX", (WIDTH, HEIGHT), screen).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


async def settle_over(screen_at: ScreenAt, *, limit_s: float) -> float:
    start = time.monotonic()

    async def screenshot() -> bytes:
        await asyncio.sleep(0)
        return png(screen_at(time.monotonic() - start))

    await settle_by_looks(screenshot, limit_s=limit_s)
    return time.monotonic() - start


async def test_settled_screen_is_detected_from_screenshots_too() -> None:
    assert 0.6 <= await settle_over(appears(0.2), limit_s=1.8) < 1.6


async def test_wait_over_screenshots_ends_at_the_limit() -> None:
    assert await settle_over(lambda at_s: filled(int(at_s * 1000) % 60, 0, 90, 90), limit_s=0.6) == pytest.approx(
        0.6, abs=0.15
    )


async def test_screenshot_that_is_not_a_picture_is_a_fault_of_the_replica() -> None:
    async def broken() -> bytes:
        return b"\x89PNG"

    with pytest.raises(ReplicaError, match="is invalid"):
        await settle_by_looks(broken, limit_s=1.0)
