"""Waits until a desktop's screen is stable instead of for a fixed time; the wait is limited, and polling is cheap."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from PIL import UnidentifiedImageError

from env_server.guest.stillness import Stillness
from env_server.guest_client import GuestClient
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.errors import ReplicaError

POLL_INTERVAL_S = 0.1
LOOK_INTERVAL_S = 0.25
"""Time between screenshots after an action; they are expensive for the guests that need them."""
SETTLE_LIMIT_S = 3.0
WINDOW_LIMIT_S = 5.0
WINDOW_CALM_S = 0.3
"""A window draws its frame before its content; only a longer calm means that it is complete."""


async def screen_digest(guest: GuestClient) -> bytes:
    # JPEG costs a fifth of PNG, and equal screens give equal bytes.
    return hashlib.sha256(await guest.screenshot("jpeg")).digest()


async def wait_until_calm(guest: GuestClient, *, before: bytes | None = None) -> None:
    """Returns when two looks 0.1 s apart are equal, at the latest after 3 s. With `before`, the screen must first
    differ from it (a window is expected) and then stay calm for 0.3 s, at the latest after 5 s."""
    calm_s = POLL_INTERVAL_S if before is None else WINDOW_CALM_S
    deadline = time.monotonic() + (SETTLE_LIMIT_S if before is None else WINDOW_LIMIT_S)
    last, calm_since = await screen_digest(guest), time.monotonic()
    while time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL_S)
        digest, now = await screen_digest(guest), time.monotonic()
        if digest != last:
            last, calm_since = digest, now
        elif digest != before and now - calm_since >= calm_s:
            return


async def settle_by_looks(screenshot: Callable[[], Awaitable[bytes]], *, limit_s: float) -> None:
    """Waits after an action of a guest that cannot wait by itself: applies the guest's rule (Stillness) to screenshots.
    A change before the first screenshot is not detected, and then the wait is longer."""
    start = time.monotonic()
    stillness: Stillness | None = None
    while True:
        looked_at_s = time.monotonic() - start
        data = await screenshot()
        stillness, has_settled = await asyncio.to_thread(_look, stillness, data, looked_at_s, limit_s)
        at_s = time.monotonic() - start
        wait_s = max(LOOK_INTERVAL_S, at_s - looked_at_s)
        if has_settled or at_s + 2 * wait_s > limit_s:  # no time for another look
            break
        await asyncio.sleep(wait_s)
    if not has_settled:
        await asyncio.sleep(limit_s - at_s)


def _look(stillness: Stillness | None, data: bytes, at_s: float, limit_s: float) -> tuple[Stillness, bool]:
    try:
        with open_picture(data) as image:
            screen, width = image.convert("RGBX").tobytes(), image.width
    except (UnidentifiedImageError, OSError) as error:
        raise ReplicaError(f"a screenshot of {len(data)} bytes is invalid: {error}; replace the replica") from error
    stillness = stillness or Stillness(screen, width=width, limit_s=limit_s)
    return stillness, stillness.look(screen, at_s)
