"""The guest of a virtual machine: OSWorld's protocol, or QEMU's own screen and keys if its agent does not answer."""

import logging
from collections.abc import AsyncGenerator, Sequence

from env_server.guest_client import DEFAULT_TIMEOUT_S, GuestCall, GuestClient, http_client_over_unix_socket
from env_server.providers.qemu.display import Display
from env_server.providers.qemu.qmp_input import QmpInput
from osworld_pipeline.errors import ReplicaError
from osworld_pipeline.wire import ImageFormat

log = logging.getLogger(__name__)

SILENCE_S = 20.0
"""If the agent does not answer the simplest request within this time, it counts as silent."""


class MachineGuest(GuestClient):
    """The guest of a machine. With `reads_display` every screenshot is taken from QEMU, which is faster than any guest
    and includes the cursor if the guest draws it itself, as ours does. Otherwise the guest is asked, as OSWorld
    does."""

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
        """Whether QEMU's own screen and keys have replaced the agent."""

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
                # The X server answers only after it has drawn all earlier requests.
                await self._request("GET", "/cursor_position", timeout_s=min(timeout_s, self._silence_s))
            except ReplicaError as error:
                self._give_up_agent(error)
        return await self._display.screenshot(image_format, quality, size)

    def frames(self, *, width: int, interval_s: float) -> AsyncGenerator[bytes, None]:
        """Frames of QEMU's display, for every guest: no agent is asked, and no time of the guest is used."""
        return self._display.frames(width, interval_s)

    async def act(self, calls: Sequence[GuestCall], *, settle_s: float | None = None, timeout_s: float = 60.0) -> bool:
        """An agent that stops answering during a call is a ReplicaError: the call is not repeated."""
        if self.is_silent:
            await self._keys.perform(calls, limit_s=timeout_s)
            return False
        return await super().act(calls, settle_s=settle_s, timeout_s=timeout_s)

    async def close(self) -> None:
        await super().close()
        self._display.close()

    def _give_up_agent(self, error: ReplicaError) -> None:
        self.is_silent = True
        log.warning("from now on the screen and keys of %s are QEMU's: %s", self._name, error)
