"""What verbs, getters and metrics use of a desktop. The env server's objects have these interfaces."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """A command that ran, or did not end in time (`status` error, `returncode` -1)."""

    status: str
    output: str
    error: str
    returncode: int

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL (9) ended it, for example at a desktop's end or out of memory; its output then proves
        nothing. A command that it ended has the status -9, a shell whose command it ended has 128 + 9."""
        return self.status == "success" and self.returncode in (-9, 128 + 9)


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """A file as a getter fetched it: bytes with a name, never a path on this machine, so grading leaves no files
    behind."""

    name: str
    data: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """UTF-8 with universal newlines, as OSWorld's open() reads it. Raises UnicodeDecodeError."""
        return self.data.decode().replace("\r\n", "\n").replace("\r", "\n")


class Programs(Protocol):
    async def execute(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        timeout_s: float,
        setup: bool = False,
        is_graders: bool = False,
    ) -> CommandResult: ...
    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None: ...
    async def open_file(self, path: str) -> None: ...


class Windows(Protocol):
    async def activate_window(self, window_name: str, *, strict: bool = False, by_class: bool = False) -> None: ...
    async def close_window(self, window_name: str, *, strict: bool = False, by_class: bool = False) -> None: ...
    async def window_size(self, app_class_name: str) -> tuple[int, int] | None: ...


class Screen(Protocol):
    async def screen_size(self) -> tuple[int, int]: ...
    async def accessibility(self) -> str: ...
    async def terminal(self) -> str | None: ...
    async def change_wallpaper(self, path: str) -> None: ...
    async def wallpaper(self, *, max_bytes: int) -> bytes | None: ...


class Files(Protocol):
    async def upload(self, path: str, data: bytes) -> None: ...
    async def file(self, path: str, *, max_bytes: int) -> bytes | None: ...
    async def list_directory(self, path: str) -> dict[str, Any] | None: ...


class Guest(Programs, Windows, Screen, Files, Protocol):
    """A desktop's guest agent. None is something that does not exist. Each method raises ReplicaError if the desktop is
    gone or was tampered with; those of a set-up raise SetupError if it is refused."""


class Cache(Protocol):
    """The files of one episode, by name."""

    def put(self, name: str, data: bytes) -> object: ...
    def get(self, name: str) -> ResultFile | None: ...
    async def fetch(self, name: str, read: Callable[[int], Awaitable[bytes | None]]) -> ResultFile | None:
        """The file with the bytes that `read` returns; `read` is called with the maximum number of bytes. None if there
        is no file, or it is too large."""
        ...


@dataclass(frozen=True, kw_only=True)
class SetupContext:
    """The desktop, files and limits of the verbs. Each function raises SetupError."""

    guest: Guest
    cache: Cache
    screen: tuple[int, int]
    download: Callable[[str], Awaitable[bytes]]
    read_upload: Callable[[str], Awaitable[bytes]]
    """Reads a file of the upload folder."""
    open_tabs: Callable[[Sequence[str]], Awaitable[object]]
    close_tabs: Callable[[Sequence[str]], Awaitable[object]]
    command_limit_s: float
    sleep_limit_s: float
