"""One bubblewrap sandbox with a desktop in it: started, watched and taken down. It owns nothing outside itself: its
file systems live in its own memory and its guest answers on a socket that has no name."""

import asyncio
import contextlib
import os
import socket
import tempfile
from pathlib import Path

from env_server.guest_client import GuestClient
from env_server.providers.base_image import GUEST_PACKAGE, HOST_NAME
from env_server.providers.requirements import SYSTEM_PATH, SYSTEM_PYTHON, explain_namespaces, sandbox_uid
from osworld_pipeline.errors import DependencyError, ReplicaError

BOOT_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
PROBE_LIMIT_S = 20.0
_TAIL_BYTES = 4000
_IMAGE_MOUNT = "/mnt"
_AS_ROOT = (
    'set -e; mount --bind "$1" /mnt; image_uid="$2"; shift 2; '
    'exec setpriv --reuid "$image_uid" --regid "$image_uid" --clear-groups "$@"'
)
"""In a mount namespace of its own: the image is shown where the sandbox's user can reach it, be the state folder as
private as it may, and then root is given up."""


class Sandbox:
    """Call `start` once, then `guest` answers until `stop`."""

    def __init__(self, *, name: str, image: Path, width: int, height: int) -> None:
        self._name, self._image, self._width, self._height = name, image, width, height
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._socket_fd: int | None = None
        self._guest: GuestClient | None = None
        self._tail = b""

    @property
    def guest(self) -> GuestClient:
        if self._guest is None:
            raise ReplicaError(f"the desktop {self._name} is not running; start or replace it")
        return self._guest

    async def start(self) -> None:
        """Returns when the guest agent has answered a screenshot; on any failure nothing is left behind."""
        try:
            await self._spawn()
            await self.guest.screenshot("jpeg", timeout_s=BOOT_LIMIT_S)
        except ReplicaError as error:
            await self.stop()
            complaint = self._tail.decode("utf-8", "replace").strip().splitlines()
            last = f" It said: {complaint[-1][:300]}" if complaint else ""
            raise ReplicaError(f"the desktop {self._name} did not come up: {error}.{last}") from error
        except BaseException:
            await self.stop()
            raise

    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def stop(self) -> None:
        """Idempotent. Killing bubblewrap ends the process namespace, and with it everything inside."""
        await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        process, guest, reader = self._process, self._guest, self._reader
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if guest is not None:
            self._guest = None
            await guest.close()
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
            except TimeoutError as error:
                raise ReplicaError(f"the desktop {self._name} outlived SIGKILL for {STOP_LIMIT_S:g} s") from error
        if reader is not None:
            # The pipe closes when the last process inside is gone: this is the proof that nothing lives on.
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(reader), STOP_LIMIT_S)
            reader.cancel()
            self._reader = None
        if self._socket_fd is not None:
            os.close(self._socket_fd)
            self._socket_fd = None

    async def _spawn(self) -> None:
        listener, self._socket_fd = _nameless_listener()
        try:
            command = bubblewrap_command(
                self._image, width=self._width, height=self._height, listener_fd=listener.fileno()
            )
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                cwd="/",
                env={"PATH": SYSTEM_PATH},
            )
        except OSError as error:
            raise DependencyError(f"cannot start bubblewrap ({error}); run `scripts/setup debian`") from error
        finally:
            listener.close()
        self._reader = asyncio.create_task(self._keep_tail())
        self._guest = GuestClient.over_unix_socket(f"/proc/self/fd/{self._socket_fd}", name=self._name)

    async def _keep_tail(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]


def bubblewrap_command(image: Path, *, width: int, height: int, listener_fd: int) -> list[str]:
    """The whole command line. Process 1 is root of the namespaces (guest/init.py), which the desktop's user is not."""
    agent = [SYSTEM_PYTHON, "-Im", f"{GUEST_PACKAGE}.agent", "--width", str(width), "--height", str(height)]
    agent += ["--listener-fd", str(listener_fd)]
    # Only the image's own folder is on the path: process 1 needs no package of the host's, and starts faster for it.
    start = f"import sys; sys.path.insert(0, '/image/opt/local/lib/' + {_SITE!r} % sys.version_info[:2]); "
    start += f"from {GUEST_PACKAGE}.init import main; main()"
    init = [SYSTEM_PYTHON, "-ISc", start, "--image", "/image", "--agent-fd", str(listener_fd), "--", *agent]
    source = str(image) if sandbox_uid() is None else _IMAGE_MOUNT
    return [*_outer_command(image), *_WALLS, "--ro-bind", source, "/image", "--", *init]


_SITE = "python%d.%d/dist-packages"
_WALLS = (
    "bwrap", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--unshare-pid", "--as-pid-1",
    "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", HOST_NAME,
    "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, "--setenv", "LANG", "C.UTF-8",
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
)  # fmt: skip


def _outer_command(image: Path) -> list[str]:
    uid = sandbox_uid()
    if uid is None:
        return []
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _AS_ROOT, "sh", str(image), str(uid)]


async def check_namespaces(image: Path) -> None:
    """Makes an empty sandbox. DependencyError names the setting where the machine forbids it."""
    command = [*_outer_command(image), *_WALLS, "--", "/usr/bin/true"]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={"PATH": SYSTEM_PATH},
        )
    except OSError as error:
        raise DependencyError(f"cannot start bubblewrap ({error}); run `scripts/setup debian`") from error
    try:
        _, complaint = await asyncio.wait_for(process.communicate(), PROBE_LIMIT_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise DependencyError(
            f"bubblewrap did not make a sandbox within {PROBE_LIMIT_S:g} s; try it by hand"
        ) from error
    if process.returncode:
        raise explain_namespaces(complaint.decode("utf-8", "replace"))


def _nameless_listener() -> tuple[socket.socket, int]:
    """A listening Unix socket whose name is gone at once, and a handle to reach it by (/proc/self/fd/N). So there is
    no file to leave behind, no limit on the path's length, and nothing in the guest that could stand in for it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with tempfile.TemporaryDirectory(prefix="desktop-") as folder:
            path = os.path.join(folder, "s")
            listener.bind(path)
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener, handle
