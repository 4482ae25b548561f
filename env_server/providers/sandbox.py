"""One bubblewrap sandbox with a desktop in it: start, liveness and end. It owns nothing outside itself: its file
systems are in its own memory and its guest answers on an unnamed socket."""

import asyncio
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from env_server.guest.processes import ENDED_FROM_INSIDE
from env_server.guest_client import GuestClient
from env_server.providers.base_image import GUEST_PACKAGE, HOST_NAME
from env_server.providers.bounds import Bounds, DesktopLimits, Group
from env_server.providers.bubblewrap import SYSTEM_FOLDERS, children_of, nameless_listener
from env_server.providers.host_resources import HostResources, Releases
from env_server.providers.host_users import HostUsers
from env_server.providers.requirements import SYSTEM_PATH, SYSTEM_PYTHON, try_sandbox
from env_server.providers.unsandboxed import plain_command
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import DependencyError, ReplicaError

BOOT_LIMIT_S = 60.0
ALIVE_INTERVAL_S = 0.1
END_LIMIT_S, DYING_LIMIT_S, DYING_INTERVAL_S = 1.0, 20.0, 0.02
"""After a lost connection: limit until process 1 is exiting, limit until the desktop has ended (high, because many
processes take long to end on a busy machine), and the poll interval."""
PROBE_LIMIT_S = 20.0
PROGRAM_NICE = 10
"""Nice value of a desktop's programs; the guest agent and the X server are in the same control group. Programs that
take all of the group's CPU time do not keep the agent from answering. Other groups are not affected."""
_IMAGE_MOUNT = "/mnt"
_AS_ROOT = (
    'set -e; mount --bind "$1" /mnt; image_uid="$2"; shift 2; '
    'exec setpriv --reuid "$image_uid" --regid "$image_uid" --clear-groups "$@"'
)
"""Run in a separate mount namespace: mounts the image where the sandbox's user can reach it, even if the state folder
is private, and then drops root."""


@dataclass(frozen=True, kw_only=True)
class DesktopSpec:
    """The parts and limits of a desktop."""

    image: Path
    width: int
    height: int
    limits: DesktopLimits
    is_sandboxed: bool = True


class Sandbox:
    """Call `start` once, then `guest` answers until `stop`."""

    def __init__(self, spec: "DesktopSpec", *, name: str, bounds: Bounds, users: HostUsers, releases: Releases) -> None:
        self._spec, self._name, self._bounds, self._users = spec, name, bounds, users
        self._releases = releases
        self._held = HostResources(
            f"the desktop {name}", users, stop_limit_s=releases.limits.one_s, has_walls=spec.is_sandboxed
        )
        self._guest: GuestClient | None = None
        self._was_stopped_alive = False

    @property
    def guest(self) -> GuestClient:
        if self._guest is None:
            raise ReplicaError(f"the desktop {self._name} is not running; start or replace it")
        return self._guest

    @property
    def group(self) -> Group | None:
        """None if it is in no control group."""
        return self._held.group

    async def start(self) -> None:
        """Returns when the guest agent has answered with a screenshot; a failure leaves nothing behind."""
        try:
            self._spawn()
            await self._first_answer()
        except OSError as error:
            await self.stop()
            raise ReplicaError(
                f"this machine cannot start the desktop {self._name}: {error}; free file descriptors, memory or "
                "space in the temporary folder"
            ) from error
        except ReplicaError as error:
            await self.stop()
            complaint = self._held.stderr_tail.lines
            last = f" Its output: {complaint[-1][:300]}" if complaint else ""
            raise ReplicaError(f"the desktop {self._name} did not start: {error}.{last}") from error
        except BaseException:
            await self.stop()
            raise

    async def _first_answer(self) -> None:
        """Stops waiting once bubblewrap has exited: an incomplete sandbox keeps the socket and never answers."""
        asking = asyncio.ensure_future(self.guest.screenshot("jpeg", timeout_s=BOOT_LIMIT_S))
        try:
            while self.is_alive() and not asking.done():
                await asyncio.wait({asking}, timeout=ALIVE_INTERVAL_S)
            await asyncio.wait({asking}, timeout=ALIVE_INTERVAL_S)
            if not asking.done():
                raise ReplicaError(f"bubblewrap of {self._name} ended while it created the desktop; start another")
            await asking
        finally:
            asking.cancel()

    def is_alive(self) -> bool:
        process = self._held.process
        return process is not None and process.poll() is None

    async def cause_inside(self) -> str | None:
        """Does the same as LocalDesktop.cause_inside. The connection is lost before the desktop has ended, so the call
        waits for the end: up to END_LIMIT_S, or up to DYING_LIMIT_S if process 1 is exiting, because process 1 waits
        for all other processes."""
        held = self._held
        began = time.monotonic()
        while self.is_alive() and (passed_s := time.monotonic() - began) < DYING_LIMIT_S:
            if passed_s > END_LIMIT_S and not self._is_dying():
                break
            await asyncio.sleep(DYING_INTERVAL_S)
        if held.process is None or self.is_alive() or self._was_stopped_alive:
            return None
        out_of_memory = held.out_of_memory
        if out_of_memory == "host":
            return None
        if held.process.returncode == ENDED_FROM_INSIDE:
            said = held.stderr_tail.lines
            return f"a program of the desktop {self._name} made it unusable: {said[-1][:200] if said else 'no reason'}"
        if out_of_memory == "own":
            return f"the programs of the desktop {self._name} exceeded its memory limit"
        return None

    def _is_dying(self) -> bool:
        """Whether process 1 has already released its memory, or is gone."""
        process = self._held.process
        try:
            return process is not None and all(
                Path(f"/proc/{pid}/statm").read_text().startswith("0 ") for pid in children_of(process.pid)
            )
        except OSError:
            return True

    async def stop(self) -> None:
        """Idempotent. Killing the sandbox's process 1 ends the process namespace, and with it every process inside.
        What has not ended within the limit is left to `releases`."""
        self._was_stopped_alive = self._was_stopped_alive or self.is_alive()
        if self._held.process is not None and not self._spec.is_sandboxed:
            self._held.process.terminate()  # it kills all its descendants
        self._guest = None
        await self._releases.release(self._held)

    def _spawn(self) -> None:
        held = self._held
        held.uid = self._users.claim()
        listener, handle = nameless_listener()
        held.descriptors.append(handle)
        try:
            held.group = self._bounds.make_group()
            command = self._command(listener.fileno())
            with held.stderr_tail.capture() as stderr:
                held.process = subprocess.Popen(
                    command if held.group is None else held.group.entering(command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                    cwd="/",
                    env={"PATH": SYSTEM_PATH},
                )
        except (FileNotFoundError, PermissionError) as error:
            raise DependencyError(f"cannot start bubblewrap ({error}); run `{how_to_set_up('debian')}`") from error
        finally:
            listener.close()
        self._guest = GuestClient.over_unix_socket(f"/proc/self/fd/{handle}", name=self._name)
        held.parts.append(self._guest)

    def _command(self, listener_fd: int) -> list[str]:
        if self._spec.is_sandboxed:
            group = self._held.group
            nice = PROGRAM_NICE if group is not None and group.shares_cpu else 0
            return bubblewrap_command(self._spec, listener_fd=listener_fd, uid=self._held.uid, nice=nice)
        image, width, height = self._spec.image, self._spec.width, self._spec.height
        return plain_command(image, width=width, height=height, listener_fd=listener_fd)


def bubblewrap_command(spec: DesktopSpec, *, listener_fd: int, uid: int | None, nice: int = 0) -> list[str]:
    """The whole command line. Process 1 is the guest agent (guest/init.py), in a user namespace above the desktop's
    user."""
    # Imports leave no garbage; the init enables its collection after them. The path starts with only the image's own
    # folder: most of the work before the agent needs no other package.
    start = "import gc, sys; gc.disable(); "
    start += f"sys.path.insert(0, '/image/opt/local/lib/' + {_SITE!r} % sys.version_info[:2]); "
    start += f"from {GUEST_PACKAGE}.init import main; main()"
    init = [SYSTEM_PYTHON, "-ISc", start, "--image", "/image", "--listener-fd", str(listener_fd)]
    init += ["--width", str(spec.width), "--height", str(spec.height)]
    init += ["--memory-bytes", str(spec.limits.memory_bytes), "--max-processes", str(spec.limits.num_processes)]
    init += ["--nice", str(nice)]
    source = str(spec.image) if uid is None else _IMAGE_MOUNT
    return [*_outer_command(spec.image, uid), *_WALLS, "--ro-bind", source, "/image", "--", *init]


_SITE = "python%d.%d/dist-packages"
_WALLS = (
    "bwrap", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--unshare-pid", "--as-pid-1",
    "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", HOST_NAME,
    "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, "--setenv", "LANG", "C.UTF-8",
    *SYSTEM_FOLDERS,
)  # fmt: skip


def _outer_command(image: Path, uid: int | None) -> list[str]:
    if uid is None:
        return []
    shell = ["/bin/sh", "-c", _AS_ROOT, "sh", str(image), str(uid)]
    return ["unshare", "--mount", "--propagation", "private", *shell]


def check_namespaces(image: Path, users: HostUsers) -> None:
    """Makes an empty sandbox. DependencyError names the setting if the machine forbids it."""
    uid = users.claim()
    try:
        try_sandbox([*_outer_command(image, uid), *_WALLS, "--", "/usr/bin/true"], limit_s=PROBE_LIMIT_S)
    finally:
        users.release(uid)
