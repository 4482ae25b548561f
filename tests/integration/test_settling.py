"""The adaptive pause on a real local desktop: with a program that answers late, and with an animation."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.bench_settling import differ_above_strip, start_slow_window
from env_server.guest_client import GuestCall, GuestClient
from env_server.providers.local.provider import LocalProvider
from osworld_pipeline.errors import ActionParseError

pytestmark = pytest.mark.desktop
LATE_S = 0.4


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[GuestClient]:
    """A desktop with a program that answers every key after `LATE_S`, and whose caret and clock keep moving."""
    provider = LocalProvider(images=tmp_path, screen_size=(512, 320))
    try:
        guest = (await provider.start("replica-0")).guest
        await start_slow_window(guest, seed=0, delays_s=(LATE_S, LATE_S))
        yield guest
    finally:
        await provider.close()


async def act(guest: GuestClient, key: str, *, settle_s: float) -> float:
    start = time.monotonic()
    assert await guest.act([GuestCall(name="press", args=(key,))], settle_s=settle_s)
    return time.monotonic() - start


@pytest.mark.parametrize("key", ["l", "s", "b"])
async def test_late_answer_is_in_the_screenshot_and_the_pause_is_cut_short(guest: GuestClient, key: str) -> None:
    """On a busy machine, where the screen is drawn irregularly, one pause may last its whole time, but not all six."""
    for _ in range(6):
        before = await guest.screenshot()
        took_s = await act(guest, key, settle_s=15.0)
        settled = await guest.screenshot()
        assert took_s > LATE_S
        assert differ_above_strip(before, settled)
        await asyncio.sleep(1.0)
        assert not differ_above_strip(settled, await guest.screenshot())
        if took_s < 14.0:
            return
    pytest.fail("a caret and a clock made six pauses whole")


async def test_an_action_that_changes_nothing_takes_the_whole_short_pause(guest: GuestClient) -> None:
    assert 0.3 <= await act(guest, "n", settle_s=0.3) < 1.0


async def test_endless_output_takes_the_whole_pause(guest: GuestClient) -> None:
    await guest.execute("pkill -f slow_window", shell=True)
    # Another number each time: output that ends in the same lines may be drawn as no change at all.
    await guest.launch(["xterm", "-e", "i=1; while :; do yes $i$i$i | head -40; i=$((i + 1)); sleep 0.05; done"])
    await guest.activate_window("xterm", by_class=True)
    assert 1.0 <= await act(guest, "n", settle_s=1.0) < 2.0


async def test_refused_call_or_limit_does_not_change_the_screen(guest: GuestClient) -> None:
    before = await guest.screenshot()
    with pytest.raises(ActionParseError, match="no call"):
        await guest.act([GuestCall(name="fly")], settle_s=30.0)
    with pytest.raises(ActionParseError, match="settle_s"):
        await guest.act([GuestCall(name="press", args=("l",))], settle_s=61.0)
    await asyncio.sleep(1.5 * LATE_S)
    assert not differ_above_strip(before, await guest.screenshot())
