"""The `local` provider: a real X11 desktop in bubblewrap namespaces, without KVM, Docker or network. A reset discards
the whole sandbox and starts another, so no state of an episode survives it."""

import asyncio
import hashlib
import logging
from pathlib import Path

from env_server.guest_client import GuestClient
from env_server.providers.base_image import ensure_image, image_digest
from env_server.providers.bounds import DEFAULT_MEMORY_BYTES, DEFAULT_NUM_PROCESSES, Bounds, DesktopLimits, Group
from env_server.providers.cpu_shares import share_cpus
from env_server.providers.host_resources import EndLimits, Releases
from env_server.providers.host_users import HostUsers
from env_server.providers.requirements import check_programs
from env_server.providers.sandbox import DesktopSpec, Sandbox, check_namespaces
from env_server.providers.unsandboxed import check_ordinary_user
from osworld_pipeline.errors import DependencyError, ReplicaError

log = logging.getLogger(__name__)

DEFAULT_SCREEN = (1920, 1080)
SMALLEST_SCREEN = (320, 200)


class LocalProvider:
    """Creates local desktops. `images` is the folder of built images; it is created if missing."""

    def __init__(
        self,
        *,
        images: Path,
        screen_size: tuple[int, int] = DEFAULT_SCREEN,
        memory_mb: int = DEFAULT_MEMORY_BYTES >> 20,
        max_processes: int = DEFAULT_NUM_PROCESSES,
        max_cpus: float | None = None,
        allow_unsandboxed: bool = False,
        wine: bool = False,
        end_limits: EndLimits | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the screen or a limit is too small for a desktop.
            DependencyError: a program is missing, or Wine if it is enabled.
        """
        if screen_size[0] < SMALLEST_SCREEN[0] or screen_size[1] < SMALLEST_SCREEN[1]:
            raise ValueError(f"a screen of {screen_size[0]}x{screen_size[1]} is too small; the minimum is 320x200")
        check_programs()
        self._images, self._screen_size = images.absolute(), screen_size
        self._limits = DesktopLimits(memory_bytes=memory_mb << 20, num_processes=max_processes, max_cpus=max_cpus)
        self._allow_unsandboxed = allow_unsandboxed
        self._has_wine = wine
        self._digest = image_digest(wine=wine)
        self._spec: DesktopSpec | None = None
        self._bounds: Bounds | None = None
        self._users: HostUsers | None = None
        self._sharing: asyncio.Task[None] | None = None
        self._building = asyncio.Lock()
        self.releases = Releases(end_limits)
        self._desktops: set[LocalDesktop] = set()

    @property
    def name(self) -> str:
        return "local"

    @property
    def image_digest(self) -> str:
        if self._spec is not None and not self._spec.is_sandboxed:
            return hashlib.sha256(f"{self._digest} without a sandbox".encode()).hexdigest()
        return self._digest

    @property
    def details(self) -> str:
        """The limits of a desktop's memory, processes and CPU time."""
        return self._bounds.description if self._bounds else ""

    async def start(self, replica_id: str) -> "LocalDesktop":
        async with self._building:
            if self._users is None:
                self._users = HostUsers.open()
            if self._spec is None:
                self._spec = await self._find_out(self._users)
            if self._bounds is None:
                self._bounds = await asyncio.to_thread(self._open_bounds)
                log.info("each desktop has %s", self.details)
                if self._bounds.shares_cpu:
                    self._sharing = asyncio.create_task(share_cpus(self._groups))
        desktop = LocalDesktop(self, replica_id, self._spec, self._bounds, self._users)
        self._desktops.add(desktop)
        try:
            await desktop.reset()
        except BaseException:
            self._desktops.discard(desktop)
            raise
        return desktop

    async def close(self) -> None:
        """
        Raises:
            ReplicaError: names what could not be removed.
        """
        desktops, self._desktops = self._desktops, set()
        await asyncio.gather(*(desktop.stop() for desktop in desktops))
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.cancel()
            await asyncio.wait({sharing})
        try:
            await self.releases.close()
        finally:
            bounds, self._bounds = self._bounds, None
            if bounds is not None:
                await asyncio.to_thread(bounds.close)

    def _open_bounds(self) -> Bounds:
        bounds = Bounds.open(self._limits)
        if self._limits.max_cpus is not None and not bounds.shares_cpu:
            bounds.close()
            raise DependencyError(
                f"local.max_cpus cannot be enforced here ({bounds.description}); start the env server as root, or as a "
                "systemd service with Delegate=yes, or remove the setting"
            )
        return bounds

    async def _find_out(self, users: HostUsers) -> DesktopSpec:
        image = await asyncio.to_thread(ensure_image, self._images, self._digest, wine=self._has_wine)
        is_sandboxed = True
        try:
            await asyncio.to_thread(check_namespaces, image, users)
        except DependencyError as error:
            if not self._allow_unsandboxed:
                raise
            check_ordinary_user()
            is_sandboxed = False
            log.warning("DESKTOPS WITHOUT A SANDBOX: the actions of a model run with your permissions (%s)", error)
        width, height = self._screen_size
        return DesktopSpec(image=image, width=width, height=height, limits=self._limits, is_sandboxed=is_sandboxed)

    def _groups(self) -> list[Group]:
        return [desktop.group for desktop in self._desktops if desktop.group is not None]

    def forget(self, desktop: "LocalDesktop") -> None:
        self._desktops.discard(desktop)


class LocalDesktop:
    def __init__(
        self, provider: LocalProvider, replica_id: str, spec: DesktopSpec, bounds: Bounds, users: HostUsers
    ) -> None:
        self._provider, self._replica_id = provider, replica_id
        self._spec, self._bounds, self._users = spec, bounds, users
        self._sandbox: Sandbox | None = None
        self._ended: Sandbox | None = None
        self._is_stopped = False

    @property
    def guest(self) -> GuestClient:
        if self._sandbox is None:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        return self._sandbox.guest

    async def reset(self) -> None:
        if self._is_stopped:
            raise ReplicaError(f"the desktop {self._replica_id} is stopped; start another")
        old, self._sandbox = self._sandbox, None
        if old is not None:
            await old.stop()
        releases = self._provider.releases
        releases.check_room()
        sandbox = Sandbox(
            self._spec,
            name=self._replica_id,
            bounds=self._bounds,
            users=self._users,
            releases=releases,
        )
        await sandbox.start()
        if self._is_stopped:  # while this was starting
            await sandbox.stop()
            raise ReplicaError(f"the desktop {self._replica_id} was stopped during its reset; start another")
        self._sandbox = sandbox

    @property
    def group(self) -> Group | None:
        return None if self._sandbox is None else self._sandbox.group

    def is_alive(self) -> bool:
        return self._sandbox is not None and self._sandbox.is_alive()

    @property
    def host_lacked_memory(self) -> bool:
        """Whether the kernel killed its processes because the host, not the desktop, was out of memory."""
        return self.group is not None and self.group.out_of_memory() == "host"

    async def cause_inside(self) -> str | None:
        """How a program of the desktop disabled it; None while it runs, or if the cause is outside."""
        sandbox = self._sandbox or self._ended
        return None if sandbox is None else await sandbox.cause_inside()

    async def stop(self) -> None:
        self._is_stopped = True
        sandbox, self._sandbox = self._sandbox, None
        self._ended = sandbox or self._ended
        self._provider.forget(self)
        if sandbox is not None:
            await sandbox.stop()
