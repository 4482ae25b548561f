"""The live episodes of a server: opens them on leased replicas, finds them, closes them, and reaps those that nobody
has used for long. Why an episode is gone is remembered for a while, so that a late call is answered with the reason."""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from env_server.download import Downloader
from env_server.episode import Episode, TaskPlan, check_env_config
from env_server.pool import Pool
from env_server.settings import Settings
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.wire import EnvConfig

log = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000


class UnknownEpisodeError(EnvServerError):
    """No live episode of that id here."""


class ScreenSizeError(EnvServerError):
    """The client wants desktops of another size than this server has."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    episode: Episode
    stack: AsyncExitStack
    """Gives back whatever the episode took."""


class EpisodeTable:
    def __init__(self, pool: Pool, settings: Settings, downloader: Downloader) -> None:
        self.pool = pool
        self._settings, self._downloader = settings, downloader
        self._entries: dict[str, _Entry] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def open(
        self, task_config: Mapping[str, Any], env_config: EnvConfig, *, client_id: str
    ) -> tuple[Episode, Observation]:
        """
        Raises:
            TaskError, ScreenSizeError: refused before a desktop is taken.
            NoCapacityError: none became free in time.
            SetupError, ReplicaError: the desktop could not be set up; it has been given back.
        """
        plan = TaskPlan.from_config(task_config)
        check_env_config(env_config)
        screen = (self._settings.screen_width, self._settings.screen_height)
        if env_config.screen_size is not None and tuple(env_config.screen_size) != screen:
            wanted = "x".join(map(str, env_config.screen_size))
            raise ScreenSizeError(
                f"this env server's screens are {screen[0]}x{screen[1]}, not {wanted}; "
                f"ask for that size, or start a server with --screen-size {wanted}"
            )
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self.pool.lease_replica(client_id))
            episode = Episode(
                episode_id=uuid.uuid4().hex,
                plan=plan,
                lease=lease,
                env_config=env_config,
                limits=self._settings.limits,
                downloader=self._downloader,
                screen=screen,
            )
            observation = await episode.prepare()
            self._entries[episode.episode_id] = _Entry(episode=episode, stack=stack.pop_all())
        return episode, observation

    def find(self, episode_id: str) -> Episode:
        """UnknownEpisodeError says why it is gone, where that is known."""
        entry = self._entries.get(episode_id)
        if entry is None:
            reason = self._tombstones.get(episode_id, "this env server never had it")
            raise UnknownEpisodeError(f"there is no live episode {episode_id[:64]!r}: {reason}; reset again")
        return entry.episode

    async def close(self, episode_id: str, reason: str = "it was closed") -> None:
        """Closing twice is no error; an id that never was is one."""
        entry = self._entries.pop(episode_id, None)
        if entry is None:
            if episode_id not in self._tombstones:
                self.find(episode_id)
            return
        self._tombstones[episode_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        await entry.stack.aclose()

    async def close_all(self, reason: str) -> None:
        for episode_id in list(self._entries):
            await self.close(episode_id, reason)

    async def reap_idle(self) -> int:
        """Closes what nobody has used for the idle limit; a call in progress is use. Returns how many."""
        ttl_s = self._settings.idle_ttl_s
        now = time.monotonic()
        idle = [
            episode_id
            for episode_id, entry in self._entries.items()
            if not entry.episode.is_busy and now - entry.episode.last_used_at > ttl_s
        ]
        for episode_id in idle:
            log.warning("episode %s was not used for %g s and is closed", episode_id, ttl_s)
            await self.close(episode_id, f"nobody used it for {ttl_s:g} s, so it was closed")
        return len(idle)

    async def run_reaper(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(min(15.0, self._settings.idle_ttl_s / 4))
            await self.reap_idle()
