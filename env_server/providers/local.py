"""The `local` provider: a real X11 desktop in bubblewrap namespaces, without KVM, Docker or network. A reset throws
the whole sandbox away and starts another, so nothing of an episode can survive it."""

import asyncio
from pathlib import Path

from env_server.guest_client import GuestClient
from env_server.providers.base_image import ensure_image, image_digest
from env_server.providers.requirements import check_programs
from env_server.providers.sandbox import Sandbox, check_namespaces
from osworld_pipeline.errors import ReplicaError

DEFAULT_SCREEN = (1920, 1080)
SMALLEST_SCREEN = (320, 200)


class LocalProvider:
    """Makes local desktops. `images` is the folder that holds built images; it is made when missing."""

    def __init__(self, *, images: Path, screen_size: tuple[int, int] = DEFAULT_SCREEN) -> None:
        if screen_size[0] < SMALLEST_SCREEN[0] or screen_size[1] < SMALLEST_SCREEN[1]:
            raise ValueError(f"a screen of {screen_size[0]}x{screen_size[1]} is too small; take 320x200 or more")
        check_programs()
        self._images, self._screen_size = images.absolute(), screen_size
        self._digest = image_digest()
        self._image: Path | None = None
        self._building = asyncio.Lock()
        self._desktops: set[LocalDesktop] = set()

    @property
    def name(self) -> str:
        return "local"

    @property
    def image_digest(self) -> str:
        return self._digest

    async def start(self, replica_id: str) -> "LocalDesktop":
        async with self._building:
            if self._image is None:
                image = await asyncio.to_thread(ensure_image, self._images, self._digest)
                await asyncio.to_thread(check_namespaces, image)
                self._image = image
        desktop = LocalDesktop(self, replica_id, image=self._image, screen_size=self._screen_size)
        self._desktops.add(desktop)
        try:
            await desktop.reset()
        except BaseException:
            self._desktops.discard(desktop)
            raise
        return desktop

    async def close(self) -> None:
        desktops, self._desktops = self._desktops, set()
        await asyncio.gather(*(desktop.stop() for desktop in desktops))

    def forget(self, desktop: "LocalDesktop") -> None:
        self._desktops.discard(desktop)


class LocalDesktop:
    def __init__(self, provider: LocalProvider, replica_id: str, *, image: Path, screen_size: tuple[int, int]) -> None:
        self._provider, self._replica_id, self._image, self._screen_size = provider, replica_id, image, screen_size
        self._sandbox: Sandbox | None = None
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
        width, height = self._screen_size
        sandbox = Sandbox(name=self._replica_id, image=self._image, width=width, height=height)
        await sandbox.start()
        if self._is_stopped:  # while this was starting
            await sandbox.stop()
            raise ReplicaError(f"the desktop {self._replica_id} was stopped during its reset; start another")
        self._sandbox = sandbox

    def is_alive(self) -> bool:
        return self._sandbox is not None and self._sandbox.is_alive()

    async def stop(self) -> None:
        self._is_stopped = True
        sandbox, self._sandbox = self._sandbox, None
        self._provider.forget(self)
        if sandbox is not None:
            await sandbox.stop()
