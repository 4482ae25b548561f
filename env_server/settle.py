"""Waits until a desktop's screen stands still, rather than for a fixed time: bounded, and cheap to ask."""

import asyncio
import hashlib
import time

from env_server.guest_client import GuestClient

POLL_INTERVAL_S = 0.1
SETTLE_LIMIT_S = 3.0
WINDOW_LIMIT_S = 5.0
WINDOW_CALM_S = 0.3
"""A window draws its frame before its content; only a longer calm means that it is there."""


async def screen_digest(guest: GuestClient) -> bytes:
    # JPEG costs a fifth of PNG, and equal screens give equal bytes.
    return hashlib.sha256(await guest.screenshot("jpeg")).digest()


async def wait_until_calm(guest: GuestClient, *, before: bytes | None = None) -> None:
    """Returns when two looks 0.1 s apart are equal, at the latest after 3 s. With `before`, the screen must first
    differ from it (a window is to appear) and then stay calm for 0.3 s, at the latest after 5 s."""
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
