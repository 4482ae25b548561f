"""The guest of a virtual machine: OSWorld's protocol, and where its agent is silent, QEMU's own screen and keys."""

import logging
from collections.abc import Sequence

from env_server.guest_client import DEFAULT_TIMEOUT_S, GuestCall, GuestClient, http_client_over_unix_socket
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.qmp_input import QmpInput
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.wire import ImageFormat

log = logging.getLogger(__name__)

SILENCE_S = 20.0
"""After so long without an answer to the simplest question the agent counts as silent."""


class MachineGuest(GuestClient):
    """`reads_display` takes every screenshot from QEMU, which is faster than any guest and shows the cursor where the
    guest draws it itself, as ours does. Without it the guest is asked, as OSWorld does."""

    has_agent = True
    """Whether there is an agent that could be silent."""

    def __init__(
        self,
        socket_path: str,
        *,
        name: str,
        display: Display,
        keys: QmpInput,
        reads_display: bool,
        silence_s: float = SILENCE_S,
    ) -> None:
        http = http_client_over_unix_socket(socket_path)
        super().__init__(http, name=name, address=f"unix:{socket_path}")
        self._display, self._keys = display, keys
        self._reads_display, self._silence_s = reads_display, silence_s
        self.is_silent = False
        """Whether the agent has been given up for the screen and the keys that QEMU itself has."""

    async def screenshot(
        self,
        image_format: ImageFormat = "png",
        *,
        quality: int | None = None,
        size: tuple[int, int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        if not self.is_silent:
            try:
                if not self._reads_display:
                    return await super().screenshot(image_format, quality=quality, size=size, timeout_s=timeout_s)
                # The X server answers only once it has put on the screen what it was told before.
                await self._request("GET", "/cursor_position", timeout_s=min(timeout_s, self._silence_s))
            except ReplicaError as error:
                self._give_up_agent(error)
        return await self._display.screenshot(image_format, quality, size)

    async def act(self, calls: Sequence[GuestCall], *, settle_s: float | None = None, timeout_s: float = 60.0) -> bool:
        """An agent that falls silent in the middle is a ReplicaError: what it may have done is not done again."""
        if self.is_silent:
            await self._keys.perform(calls, limit_s=timeout_s)
            return False
        return await super().act(calls, settle_s=settle_s, timeout_s=timeout_s)

    async def close(self) -> None:
        await super().close()
        self._display.close()

    def _give_up_agent(self, error: ReplicaError) -> None:
        self.is_silent = True
        log.warning("%s; its screen and keys go through QEMU from now on", error)
