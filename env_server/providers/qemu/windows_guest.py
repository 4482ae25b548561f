"""A Windows guest without OSWorld's server: its screen, keys and mouse are QEMU's, its files are read through the file
channel, and calls that need a program inside are refused."""

from collections.abc import Sequence
from typing import Any, NoReturn

from env_server.providers.qemu.display import Display
from env_server.providers.qemu.file_channel import MAX_FILE_BYTES, FileChannel
from env_server.providers.qemu.guest import MachineGuest
from env_server.providers.qemu.qmp_input import QmpInput
from osworld_pipeline.errors import ReplicaError, SetupError
from osworld_pipeline.task_schema.context import CommandResult


class WindowsGuest(MachineGuest):
    has_agent = False

    def __init__(self, channel: FileChannel, socket_path: str, *, name: str, display: Display, keys: QmpInput) -> None:
        super().__init__(socket_path, name=name, display=display, keys=keys, reads_display=True)
        self.is_silent = True
        self._channel, self._screen = channel, display

    async def file(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, timeout_s: float = 120.0) -> bytes | None:
        return await self._channel.read(path, max_bytes=max_bytes, timeout_s=timeout_s)

    async def platform(self) -> str:
        """Checks also that the guest is alive. ReplicaError if its file server does not answer."""
        if not await self._channel.is_ready():
            raise ReplicaError(f"the file server of {self._name} does not answer; replace the replica")
        return "Windows"

    async def accessibility(self, *, timeout_s: float = 60.0) -> str:
        """Empty: no tree is available from outside."""
        return ""

    async def terminal(self) -> str | None:
        return None

    async def screen_size(self) -> tuple[int, int]:
        return await self._screen.size()

    async def execute(self, *_: Any, **__: Any) -> CommandResult:
        self._refuse("runs no commands")

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        self._refuse("starts no programs")

    async def upload(self, path: str, data: bytes, *, timeout_s: float = 120.0) -> None:
        self._refuse("accepts no files")

    async def close(self) -> None:
        await self._channel.close()
        await super().close()

    def _refuse(self, what: str) -> NoReturn:
        raise SetupError(
            f"the Windows guest of {self._name} {what}: it has no guest server; install OSWorld's in the image and "
            "leave os_type out, or use tasks without set-up verbs"
        )
