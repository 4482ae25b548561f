"""The live episodes of a server. Opens them on leased replicas, finds them, closes them, and closes those that are idle
too long. The reason why an episode is gone is kept for a while, so that a late call is answered with it."""

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from env_server.driving.driver import Drivers, Plan, View, check_env_config
from env_server.episodes.episode import Episode, OnTiming
from env_server.episodes.outcomes import EpisodeOutcome
from env_server.replicas.pool import Pool
from env_server.settings import Settings
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import EnvServerError, NoCapacityError, PipelineError
from osworld_pipeline.wire import EnvConfig

log = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000
CLOSE_GRACE_S = 1.0
UNCLAIMED_S = 4.0
"""How long an episode whose client disconnected during a named reset is kept for a retry of that client."""


class UnknownEpisodeError(EnvServerError):
    """There is no live episode with that id."""


class ScreenSizeError(EnvServerError):
    """The client requests desktops of another size than this server has."""


@dataclass(frozen=True, kw_only=True)
class EpisodeEnd:
    """The record of an episode that is over; one for each episode that got a desktop."""

    episode_id: str
    client_id: str
    replica_id: str
    task_id: str
    outcome: EpisodeOutcome
    num_steps: int
    duration_s: float
    reward: float | None
    """None if it was not evaluated."""
    num_person_inputs: int = 0
    """Inputs that a person sent: above 0 the episode is touched."""
    record_id: str = ""
    """The same as in Episode."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    episode: Episode
    stack: AsyncExitStack
    """Releases everything that the episode acquired."""


Opened = tuple[Episode, Observation]


class EpisodeTable:
    """`on_end` is called with every episode that is over, `on_timing` with the time of each part of a call."""

    def __init__(
        self,
        pool: Pool,
        settings: Settings,
        drivers: Drivers,
        *,
        on_end: Callable[[EpisodeEnd], None] = lambda _: None,
        on_timing: OnTiming = lambda part, seconds: None,
        unclaimed_s: float = UNCLAIMED_S,
    ) -> None:
        self.pool, self.drivers = pool, drivers
        self.on_timing = on_timing
        self._settings, self._on_end = settings, on_end
        self._closing, self._unclaimed_s = asyncio.Event(), unclaimed_s
        self._entries: dict[str, _Entry] = {}
        self._openings: dict[tuple[str, str], asyncio.Task[Opened]] = {}
        self._num_waiting: Counter[asyncio.Task[Opened]] = Counter()
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._num_opening = 0
        self.num_opened = 0
        """Number of episodes that got a desktop, since the start."""
        self.outcomes: Counter[EpisodeOutcome] = Counter()
        """Counts of the episodes that are over."""
        self.last_ends: dict[str, EpisodeEnd] = {}
        """The last ended episode of each replica, by replica id."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Episode]:
        return iter([entry.episode for entry in self._entries.values()])

    @property
    def num_open(self) -> int:
        """Live episodes, and those being opened."""
        return self._num_opening + len(self._entries)

    @property
    def num_calls(self) -> int:
        """Calls in progress: episodes being opened, and live ones that are busy."""
        return self._num_opening + sum(entry.episode.is_busy for entry in self._entries.values())

    def plan(self, task_config: Mapping[str, Any], env_config: EnvConfig) -> Plan:
        """
        Raises:
            TaskError, ScreenSizeError: refused, before a desktop is leased.
        """
        plan = self.drivers.plan(task_config)
        self.check(env_config)
        return plan

    def check(self, env_config: EnvConfig) -> None:
        """
        Raises:
            TaskError, ScreenSizeError: this server has no such desktops.
        """
        check_env_config(env_config)
        screen = (self._settings.screen_width, self._settings.screen_height)
        if env_config.screen_size is not None and tuple(env_config.screen_size) != screen:
            wanted = "x".join(map(str, env_config.screen_size))
            raise ScreenSizeError(
                f"this env server's screens are {screen[0]}x{screen[1]}, not {wanted}; "
                f"ask for {screen[0]}x{screen[1]}, or start a server with --screen-size {wanted}"
            )

    async def open(
        self,
        task_config: Mapping[str, Any],
        env_config: EnvConfig,
        *,
        client_id: str,
        request_id: str = "",
        queue_s: float | None = None,
    ) -> Opened:
        """A cancelled caller leaves no episode behind; one that named its request may retry within a few seconds and
        gets the episode that was being opened. `queue_s`: as in Pool.lease_replica.

        Raises:
            TaskError, ScreenSizeError: refused before a desktop is leased.
            NoCapacityError: none became free in time, or the server is draining or shutting down.
            SetupError, ReplicaError: the desktop could not be set up; it has been returned to the pool.
        """
        if not request_id:
            return await self._open(self.plan(task_config, env_config), env_config, client_id, queue_s)
        key = (client_id, request_id)
        opening = self._openings.get(key)
        if opening is None or not self._is_wanted(opening):
            plan = self.plan(task_config, env_config)
            opening = asyncio.create_task(self._open(plan, env_config, client_id, queue_s))
            self._openings[key] = opening
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # avoids "never retrieved"
        self._num_waiting[opening] += 1
        try:
            episode, observation = await asyncio.shield(opening)
            episode.touch()
            return episode, observation
        except asyncio.CancelledError:
            self.hang_up(client_id, request_id)
            raise
        except PipelineError:
            self._openings.pop(key, None)
            raise
        finally:
            self._num_waiting[opening] -= 1
            if not self._num_waiting[opening]:
                del self._num_waiting[opening]

    def hang_up(self, client_id: str, request_id: str) -> None:
        """The client of a named reset disconnected; unless it retries within a few seconds, its desktop is returned."""
        opening = self._openings.get((client_id, request_id))
        if opening is not None:
            asyncio.get_running_loop().call_later(self._unclaimed_s, self._abandon, opening, time.monotonic())

    async def _open(self, plan: Plan, env_config: EnvConfig, client_id: str, queue_s: float | None) -> Opened:
        self._num_opening += 1
        try:
            async with AsyncExitStack() as stack:
                lease = await stack.enter_async_context(self.pool.lease_replica(client_id, queue_s=queue_s))
                episode = Episode(
                    episode_id=uuid.uuid4().hex,
                    plan=plan,
                    lease=lease,
                    view=View.of(env_config),
                    client_id=client_id,
                    on_timing=self.on_timing,
                )
                stack.push_async_callback(episode.close)
                self.num_opened += 1
                observation = await self._prepare(episode)
                self._entries[episode.episode_id] = _Entry(episode=episode, stack=stack.pop_all())
            return episode, observation
        finally:
            self._num_opening -= 1

    async def _prepare(self, episode: Episode) -> Observation:
        """The first observation. On any error or cancellation the episode is recorded as ended."""
        try:
            return await self._prepare_unless_closing(episode)
        except BaseException as error:
            if self._closing.is_set():
                self._report_end(episode, "shutdown")
            else:
                self._report_end(episode, "client_gone" if isinstance(error, asyncio.CancelledError) else "env_fault")
            raise

    async def _prepare_unless_closing(self, episode: Episode) -> Observation:
        preparing, closing = asyncio.ensure_future(episode.prepare()), asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({preparing, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                raise NoCapacityError("the env server is shutting down; use another one")
            return preparing.result()
        finally:
            for task in (preparing, closing):
                task.cancel()
            await asyncio.gather(preparing, closing, return_exceptions=True)

    def _is_wanted(self, opening: asyncio.Task[Opened]) -> bool:
        """Whether `opening` is still running, or its episode is alive and has no step yet."""
        if not opening.done():
            return True
        if opening.cancelled() or opening.exception() is not None:
            return False
        episode = opening.result()[0]
        return episode.episode_id in self._entries and episode.num_steps == 0

    def _abandon(self, opening: asyncio.Task[Opened], hung_up_at: float) -> None:
        """Cancels `opening`, or closes its episode, unless a client has claimed it since."""
        if not opening.done():
            if not self._num_waiting[opening]:
                opening.cancel()
            return
        if opening.cancelled() or opening.exception() is not None:
            return
        episode = opening.result()[0]
        is_unused = episode.last_used_at <= max(hung_up_at, episode.prepared_at) and not episode.is_busy
        if episode.episode_id in self._entries and is_unused:
            closing = asyncio.ensure_future(
                self.close(episode.episode_id, "its client disconnected during reset", outcome="client_gone")
            )
            closing.add_done_callback(lambda task: task.exception())

    def _forget_openings(self) -> None:
        for key, opening in list(self._openings.items()):
            if not self._is_wanted(opening):
                del self._openings[key]

    def find(self, episode_id: str) -> Episode:
        """Raises UnknownEpisodeError, which says why the episode is gone if that is known."""
        entry = self._entries.get(episode_id)
        if entry is None:
            reason = self._tombstones.get(episode_id, "this env server never had it")
            raise UnknownEpisodeError(f"there is no live episode {episode_id[:64]!r}: {reason}; reset again")
        return entry.episode

    async def close(
        self, episode_id: str, reason: str = "it was closed", *, outcome: EpisodeOutcome = "closed"
    ) -> None:
        """Closing twice is no error. UnknownEpisodeError for an unknown id."""
        entry = self._entries.pop(episode_id, None)
        if entry is None:
            if episode_id not in self._tombstones:
                self.find(episode_id)
            return
        self._tombstones[episode_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._forget_openings()
        self._report_end(entry.episode, entry.episode.outcome(outcome))
        await entry.stack.aclose()

    async def close_all(self, reason: str) -> None:
        """No episode is opened afterwards."""
        self._closing.set()
        self.pool.is_ending = True
        openings, self._openings = self._openings, {}
        if openings:
            _, stuck = await asyncio.wait(openings.values(), timeout=CLOSE_GRACE_S)
            for opening in stuck:
                opening.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        for episode_id in list(self._entries):
            await self.close(episode_id, reason, outcome="shutdown")

    async def reap_idle(self) -> int:
        """Closes episodes that were not used for the idle limit; a call in progress is use. Returns how many."""
        now = time.monotonic()
        idle = {
            episode.episode_id: ttl_s
            for episode in self
            if not episode.is_busy
            and now - episode.last_used_at > (ttl_s := episode.idle_ttl_s or self._settings.idle_ttl_s)
        }
        for episode_id, ttl_s in idle.items():
            log.warning("episode %s was not used for %g s and is closed", episode_id, ttl_s)
            await self.close(episode_id, f"it was not used for {ttl_s:g} s, so it was closed", outcome="idle")
        return len(idle)

    async def run_reaper(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._settings.idle_ttl_s / 4))
            await self.reap_idle()

    def _report_end(self, episode: Episode, outcome: EpisodeOutcome) -> None:
        self.outcomes[outcome] += 1
        end = EpisodeEnd(
            episode_id=episode.episode_id,
            client_id=episode.client_id,
            replica_id=episode.replica_id,
            task_id=episode.plan.task.task_id,
            outcome=outcome,
            num_steps=episode.num_steps,
            duration_s=time.monotonic() - episode.opened_at,
            reward=episode.reward,
            num_person_inputs=episode.num_person_inputs,
            record_id=episode.record_id,
        )
        self.last_ends[episode.replica_id] = end
        self._on_end(end)
