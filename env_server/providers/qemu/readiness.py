"""When a booted machine with a guest agent is ready: the agent answers, and the screen is stable."""

import asyncio
import hashlib
import time

from env_server.guest_client import GuestClient
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.machine import Machine
from osworld_pipeline.errors import ReplicaError

CALM_LIMIT_S = 60.0
"""If the screen is never stable, the machine counts as ready after this time."""
_POLL_S = 0.25


async def wait_for_agent(machine: Machine, *, calm_s: float) -> None:
    """Waits until the agent answers, without a limit, and then until the screen has been stable for `calm_s`, at most
    CALM_LIMIT_S. ReplicaError if the machine ends."""
    display = Display(machine.qmp, name=machine.name)
    guest = GuestClient.over_unix_socket(machine.guest_socket, name=machine.name)
    try:
        while not await _answers(guest):
            if not machine.is_alive():
                raise ReplicaError(f"{machine.name} ended before its guest agent answered")
            await asyncio.sleep(_POLL_S)
        last, calm_since = b"", time.monotonic()
        until = calm_since + CALM_LIMIT_S
        while time.monotonic() < min(until, calm_since + calm_s):
            await asyncio.sleep(_POLL_S)
            shown = hashlib.sha256(await display.dump()).digest()
            if shown != last:
                last, calm_since = shown, time.monotonic()
    finally:
        await guest.close()
        display.close()


async def _answers(guest: GuestClient) -> bool:
    try:
        await guest.screenshot(timeout_s=20.0)
    except ReplicaError:
        return False
    return True
