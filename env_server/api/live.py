"""Live screens for people who watch: each replica's screen is read a few times a second, once for each requested width,
however many people watch it, and only while it is watched. Nothing is sent while nothing changes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager

from env_server.guest_client import NoFramesError
from env_server.replicas.pool import Pool
from env_server.replicas.replica import Replica
from osworld_pipeline.errors import NoCapacityError, ReplicaError
from osworld_pipeline.wire.live_screens import STREAM_S, screen_record

FRAMES_PER_S = 2.0
CLOSE_UP_WIDTH = 960
"""A frame of this width or more shows one enlarged desktop."""
CLOSE_UP_FRAMES_PER_S = 5.0
MAX_STREAMS = 16
LOOK_INTERVAL_S = 1.0
RETRY_S = 0.5
"""Delay before the frames of a desktop are requested again, for example during its reset."""


class LiveScreens:
    """Streams of records (wire/live_screens.py)."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._cameras: dict[tuple[str, int], _Camera] = {}
        self._num_streams = 0

    def need_room(self) -> None:
        """
        Raises:
            NoCapacityError: too many people watch.
        """
        if self._num_streams >= MAX_STREAMS:
            raise NoCapacityError(f"{MAX_STREAMS} pages are watching already; close one of them")

    async def stream(self, replica_ids: Sequence[str], width: int) -> AsyncGenerator[bytes, None]:
        """The frames of these replicas as they change; unknown ids have none."""
        has_changed, wanted, end = asyncio.Event(), set(replica_ids), time.monotonic() + STREAM_S
        with ExitStack() as stack:
            self._num_streams += 1
            stack.callback(self._leave)
            cameras = [
                stack.enter_context(self._watched(replica, width, has_changed))
                for replica in self._pool.replicas
                if replica.replica_id in wanted
            ]
            sent = dict.fromkeys(cameras, 0)
            while not self._pool.is_ending and time.monotonic() < end:
                has_changed.clear()
                for camera in cameras:
                    if camera.num_frames > sent[camera]:
                        sent[camera] = camera.num_frames
                        yield camera.record()
                try:
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await has_changed.wait()
                except TimeoutError:
                    continue

    def _leave(self) -> None:
        self._num_streams -= 1

    @contextmanager
    def _watched(self, replica: Replica, width: int, has_changed: asyncio.Event) -> "Iterator[_Camera]":
        key = (replica.replica_id, width)
        camera = self._cameras.get(key)
        if camera is None:
            camera = self._cameras[key] = _Camera(replica, width)
        camera.watchers.append(has_changed)
        try:
            yield camera
        finally:
            camera.watchers.remove(has_changed)
            if not camera.watchers:
                camera.stop()
                self._cameras.pop(key, None)


class _Camera:
    """Reads the frames of a replica and keeps the last one, while there are watchers."""

    def __init__(self, replica: Replica, width: int) -> None:
        self._replica, self._width = replica, width
        self._interval_s = 1 / (CLOSE_UP_FRAMES_PER_S if width >= CLOSE_UP_WIDTH else FRAMES_PER_S)
        self._picture = b""
        self.watchers: list[asyncio.Event] = []
        self.num_frames = 0
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    def record(self) -> bytes:
        return screen_record(self._replica.replica_id, self._picture)

    async def _run(self) -> None:
        """Runs until it is stopped, or until its guest has no frames."""
        while True:
            try:
                await self._follow()
            except NoFramesError:
                return
            except ReplicaError:
                pass  # it is being reset; its watcher detects whether it is dead
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Shows the frames of the present desktop until their stream ends."""
        desktop = self._replica.desktop
        if desktop is None:
            return
        async with aclosing(desktop.guest.frames(width=self._width, interval_s=self._interval_s)) as pictures:
            async for picture in pictures:
                self._picture, self.num_frames = picture, self.num_frames + 1
                for watcher in self.watchers:
                    watcher.set()
